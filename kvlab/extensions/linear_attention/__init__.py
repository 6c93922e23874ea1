"""Gated linear attention: layers that fold all tokens into a state of fixed size.

`arithmetic` has what specs and layouts ask, without torch; `gated_delta` the torch module;
`delta_rule` the recurrence, in chunks and token by token.
"""
