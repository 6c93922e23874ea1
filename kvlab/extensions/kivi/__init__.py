"""Old tokens in blocks of codes, the newest in full: `kv_dtype: kivi4`, `kivi2`. See README.md."""
