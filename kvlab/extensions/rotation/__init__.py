"""`serving.kv_rotate`: K and V are stored in another orthonormal basis. See README.md."""
