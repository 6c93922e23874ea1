"""Features beside the core, one folder each: spec section, code and page.

Sections of the spec live here as well, and `kvlab.spec` imports them. It is imported first, so that
a module of an extension may be the first that is imported of kvlab.
"""

import kvlab.spec  # noqa: F401
