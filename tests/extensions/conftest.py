"""Tests of an extension that need another one are not collected without it."""

from tests.support.extensions import TRIED_WITH, is_tried

collect_ignore_glob = [f"{name}/test_*" for name in TRIED_WITH if not is_tried(name)]
