"""The gated delta rule (arXiv 2412.06464, section 3): a recurrence over the tokens of a text.

Of each token a head has a key k and a value v, a decay a in (0, 1] and a rate b in (0, 1). With the
state S, a matrix from keys to values,

    S' = a S                       the state decays
    u = b (v - S'^T k)             what the state does not give for k yet
    S = S' + k u^T                 is added
    y = S^T q                      and queries read the new state

Keys are of length 1, so the rule is one step of gradient descent on ``|S^T k - v|^2``.

`mix_chunks` computes chunks of C tokens by matrix products. With g the sum of log a from the first
token of the chunk on, and S the state before it, the u of a chunk solve a triangular system:

    u_i + b_i sum_{j<i} exp(g_i - g_j) (k_i . k_j) u_j = b_i (v_i - exp(g_i) S^T k_i)

All its exponents are at most 0, so nothing overflows, however fast a head forgets.

Shapes: B rows, H states, R query heads of each, T tokens, N chunks, C tokens of one, D head_dim.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kvlab.extensions.linear_attention.arithmetic import CHUNK_TOKENS


def mix_token(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, rate: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Take one token into a state; the arguments and results of `mix_chunks`, with T = 1."""
    key = k.transpose(2, 3)  # (B, H, D, 1)
    state = state * log_decay.exp()[..., None]
    change = rate[..., None] * (v - k @ state)
    state = state + key @ change
    return (q.squeeze(3) @ state)[:, :, :, None], state


@torch.compiler.disable(  # type: ignore[no-untyped-call, untyped-decorator]
    reason="its loop over chunks would be unrolled, and compiled for minutes"
)
def mix_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    rate: Tensor,
    state: Tensor | None = None,
    documents: Tensor | None = None,
    chunk: int = CHUNK_TOKENS,
) -> tuple[Tensor, Tensor]:
    """Take all tokens into a state, and read it after each.

    Args:
        q: (B, H, R, T, D), of the queries that read each state.
        k, v: (B, H, T, D).
        log_decay, rate: (B, H, T). A token whose decay has the log 0 and whose rate is 0 changes
            nothing.
        state: (B, H, D, D) before the first token; None for an empty one.
        documents: (B, T), rising numbers: the state is empty before the first token of each. They
            go with no ``state``.
        chunk: tokens C.

    Returns:
        What queries read, (B, H, R, T, D), and the state after the last token.
    """
    length = k.shape[2]
    chunk = min(chunk, length)
    padding = -length % chunk
    if padding:  # by tokens that change nothing
        q, k, v = (F.pad(x, (0, 0, 0, padding)) for x in (q, k, v))
        log_decay, rate = (F.pad(x, (0, padding)) for x in (log_decay, rate))
        if documents is not None:
            documents = torch.cat([documents, documents[:, -1:].expand(-1, padding)], 1)
    q, k, v = (x.reshape(*x.shape[:-2], -1, chunk, x.shape[-1]) for x in (q, k, v))
    rate, log_decay = (x.reshape(*x.shape[:-1], -1, chunk) for x in (rate, log_decay))
    fades, past = _find_decays(log_decay, documents)
    rate, past, keys_t = rate[..., None], past[..., None], k.transpose(-1, -2)
    system = (rate * fades * (k @ keys_t)).tril(-1)
    known = torch.cat([rate * v, rate * past * k], -1)
    solved = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    own, by_state = solved.chunk(2, -1)  # u = own - by_state S
    read = fades[:, :, None] * (q @ keys_t[:, :, None])  # (B, H, R, N, C, C)
    added = (k * fades[..., -1, :, None]).transpose(-1, -2)
    if state is None:
        state = k.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1])
    out, parts = [], (own, by_state, q * past[:, :, None], read, past[..., -1:, :], added)
    for own_n, by_state_n, q_n, read_n, kept, added_n in zip(
        *(part.unbind(-3) for part in parts), strict=True
    ):
        change = own_n - by_state_n @ state
        out.append(q_n @ state[:, :, None] + read_n @ change[:, :, None])
        state = kept * state + added_n @ change
    return torch.stack(out, 3).flatten(3, 4)[:, :, :, :length], state


def _find_decays(log_decay: Tensor, documents: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return what of each token is left at each later one of its chunk, and what of the state.

    Args:
        log_decay: (B, H, N, C).
        documents: (B, N x C), as in `mix_chunks`.

    Returns:
        (B, H, N, C, C), 0 for tokens that are later or of another document; and (B, H, N, C), 0 in
        documents that begin in the chunk.
    """
    decay = log_decay.cumsum(-1)
    gap, past = decay[..., :, None] - decay[..., None, :], decay.exp()
    sees = torch.ones(gap.shape[-2:], dtype=torch.bool, device=gap.device).tril()
    if documents is not None:
        numbers = documents.reshape(len(documents), 1, *log_decay.shape[2:])
        sees = sees & (numbers[..., :, None] == numbers[..., None, :])
        past = past * (numbers == numbers[..., -1:].roll(1, 2))  # of where the chunk before ended
    return gap.masked_fill(~sees, -torch.inf).exp(), past
