"""The compiled module (csrc/bindings.cpp). Addresses are `tensor.data_ptr()`, 0 for an absent tensor."""

_Matrix = tuple[int, int, int, int, int, int]
_Map = tuple[int, float, float, float]
_Four = tuple[int, int, int, int]
_Outputs = tuple[int, int, int, int, float]
_Operand = tuple[int, int, int, int, int, int]
_Tokens = tuple[int, int, int, int, int, int, int, int, int, int]

NPARAMS: int
NSUMS: int

def isa() -> str: ...
def available_isas() -> list[str]: ...
def logprob_forward(
    dtype: int, threads: int, logits: _Matrix, targets: int, active: int, map: _Map, out: _Four
) -> None: ...
def logprob_backward(
    dtype: int, threads: int, logits: _Matrix, targets: int, saved: _Four, c: int, e: int, map: _Map, gradient: _Matrix
) -> None: ...
def token_loss(
    dtype: int, threads: int, spec: list[float], logp: int, entropy: int, tokens: _Tokens, out: _Outputs
) -> None: ...
def loss_forward(
    dtype: int,
    threads: int,
    spec: list[float],
    logits: _Matrix,
    targets: int,
    scale: int,
    tokens: _Tokens,
    map: _Map,
    rows: _Four,
    out: _Outputs,
    gradient: _Matrix,
) -> None: ...
def distill(
    dtypes: tuple[int, int],
    threads: int,
    student: _Matrix,
    teacher: _Matrix,
    divergence: tuple[int, float, float, float, float],
    w: int,
    out: tuple[int, int, int],
    gradient: _Matrix,
) -> None: ...
def want_huge_pages(data: int, bytes: int) -> None: ...
def has_product() -> bool: ...
def product(threads: int, a: _Operand, order: int, b: _Operand, out: tuple[int, int, int, bool]) -> None: ...
