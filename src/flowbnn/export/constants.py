"""Values that a trace stores as constants, and functions that would fix the batch size of a trace."""

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from threading import RLock
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


class ConstantValues(TorchFunctionMode):
    """Replaces values that do not depend on the inputs by constants of the graph.

    The module runs several times, on different inputs, before it is traced. A factorization with equal results, as in an orthogonal
    parametrization, is a constant, because ONNX has no factorizations and no triangular solves. A triangular system with equal matrices
    becomes a product with the inverse. A condition ``if tensor:`` is a constant if the tensor was computed without the inputs, as a
    comparison of two attention masks is.

    Results are matched by the line of code that calls the function, because a trace leaves out the checks of values.
    """

    FACTORIZATIONS = (
        torch.linalg.qr,
        torch.linalg.slogdet,
        torch.linalg.inv,
        torch.linalg.cholesky,
        torch.linalg.householder_product,
        torch.linalg.matrix_exp,
        torch.linalg.solve,
        torch.linalg.svd,
        torch.matrix_exp,
        torch.slogdet,
        torch.logdet,
    )
    # functions whose results in Python, or whose numbers of rows, depend on values
    ESCAPES = (
        "item",
        "tolist",
        "numpy",
        "__array__",
        "__float__",
        "__int__",
        "__index__",
        "nonzero",
        "argwhere",
        "masked_select",
        "unique",
        "unique_consecutive",
    )

    def __init__(self) -> None:
        super().__init__()
        self.passes: list[dict[Any, list[Any]]] = []  # results of each line of code, in each pass
        self.constants: dict[Any, list[Any]] | None = None
        self.positions: Counter[Any] = Counter()
        self.has_conditions = False
        self.dependent = dict[Any, Any]()  # storages that hold values computed from the inputs
        self.has_escaped = False  # True if Python holds such a value

    def begin_pass(self, inputs: Sequence[Tensor]) -> None:
        """Begins a pass that records results.

        Args:
            inputs: Arguments of the module.
        """
        self.passes.append(defaultdict(list))
        self.dependent, self.has_escaped = {}, False
        self._mark(inputs)

    def begin_trace(self) -> None:
        """Begins the pass that is traced."""
        first, *others = self.passes
        self.constants = {
            line: [
                value if all(_equal(value, other[line][i]) for other in others) else None
                for i, value in enumerate(values)
            ]
            for line, values in first.items()
            if all(len(other[line]) == len(values) for other in others)
        }
        self.positions.clear()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.linalg.solve_triangular:
            return self._solve(*args, **kwargs)
        if func in REPLACEMENTS:
            return REPLACEMENTS[func](*args, **kwargs)
        if func in self.FACTORIZATIONS:
            return self._result(lambda: func(*args, **kwargs))
        depends = self.constants is None and self._depends((args, kwargs))
        if func is Tensor.__bool__:
            self.has_conditions = True
            return self._result(lambda: func(*args), is_constant=not (depends or self.has_escaped))
        result = func(*args, **kwargs)
        if depends:
            name = getattr(func, "__name__", "")
            writes = name.endswith("_") or "out" in kwargs
            self._mark((args[:1], kwargs.get("out"), result) if writes else result)
            has_mask = name == "__getitem__" and any(
                tensor.dtype is torch.bool for tensor in _tensors(args[1:])
            )
            self.has_escaped = self.has_escaped or has_mask or name in self.ESCAPES
        return result

    def _mark(self, values: Any) -> None:
        """Marks tensors as computed from the inputs."""
        for tensor in _tensors(values):
            if is_functorch_wrapped_tensor(tensor):  # under vmap, whose results are not seen here
                self.has_escaped = True
                continue
            storage = tensor.untyped_storage()
            self.dependent[storage._cdata] = storage  # which must live as long as its address is a key

    def _depends(self, values: Any) -> bool:
        """Returns True if a tensor was computed from the inputs."""
        return any(
            is_functorch_wrapped_tensor(tensor) or tensor.untyped_storage()._cdata in self.dependent
            for tensor in _tensors(values)
        )

    def _solve(self, matrix: Tensor, value: Tensor, *, left: bool = True, **options: bool) -> Tensor:
        identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
        inverse = self._result(lambda: torch.linalg.solve_triangular(matrix, identity, **options))
        return inverse @ value if left else value @ inverse

    def _result(self, compute: Callable[[], Any], is_constant: bool = True) -> Any:
        line = _calling_line()
        if self.constants is None:
            with torch._C.DisableTorchFunction():
                result = compute()
            self.passes[-1][line].append(result if is_constant else None)
            return result
        values, position = self.constants.get(line, []), self.positions[line]
        self.positions[line] += 1
        constant = values[position] if position < len(values) else None
        return compute() if constant is None else constant


def _calling_line() -> tuple[str, int]:
    """Returns the file and the number of the innermost line that is neither of torch nor of this file."""
    frame = sys._getframe(1)
    while frame.f_back and (frame.f_globals is globals() or _is_torch(frame.f_globals)):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


# -------------------- functions whose kernels fix the batch size of a trace


def _simple_cell(activation: Callable[[Tensor], Tensor], x: Tensor, hidden: Tensor, *weights: Any) -> Tensor:
    w_x, w_h, b_x, b_h = weights
    return activation(F.linear(x, w_x, b_x) + F.linear(hidden, w_h, b_h))


def _gru_cell(
    x: Tensor, hidden: Tensor, w_x: Tensor, w_h: Tensor, b_x: Any = None, b_h: Any = None
) -> Tensor:
    reset_x, update_x, new_x = F.linear(x, w_x, b_x).chunk(3, -1)
    reset_h, update_h, new_h = F.linear(hidden, w_h, b_h).chunk(3, -1)
    new = torch.tanh(new_x + torch.sigmoid(reset_x + reset_h) * new_h)
    return new + torch.sigmoid(update_x + update_h) * (hidden - new)


def _lstm_cell(
    x: Tensor, state: tuple[Tensor, Tensor], w_x: Tensor, w_h: Tensor, b_x: Any = None, b_h: Any = None
) -> tuple[Tensor, Tensor]:
    gates = (F.linear(x, w_x, b_x) + F.linear(state[0], w_h, b_h)).chunk(4, -1)
    entry, forget, output = (torch.sigmoid(gates[index]) for index in (0, 1, 3))
    cell = forget * state[1] + entry * torch.tanh(gates[2])
    return output * torch.tanh(cell), cell


def _cdist(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: Any = None) -> Tensor:
    return torch.linalg.vector_norm(x1.unsqueeze(-2) - x2.unsqueeze(-3), p, -1)


REPLACEMENTS: dict[Any, Callable[..., Any]] = {
    torch.cdist: _cdist,
    torch.rnn_tanh_cell: partial(_simple_cell, torch.tanh),
    torch.rnn_relu_cell: partial(_simple_cell, torch.relu),
    torch.gru_cell: _gru_cell,
    torch.lstm_cell: _lstm_cell,
}


def _equal(first: Any, second: Any) -> bool:
    """Returns True if two tensors, or all tensors of two tuples, are equal."""
    if isinstance(first, Tensor):
        return torch.equal(first, second)
    if isinstance(first, bool | None):
        return first is second
    return all(_equal(a, b) for a, b in zip(first, second, strict=True))


def _tensors(values: Any) -> Iterator[Tensor]:
    """Yields all tensors in nested lists, tuples and mappings."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, Mapping):
        yield from _tensors(list(values.values()))
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)


# -------------------- number of rows

_LEN_LOCK = RLock()


def _traceable_len(value: Any, /) -> Any:
    """Returns ``len(value)``, or the symbol of the batch size."""
    return value.shape[0] if isinstance(value, Tensor) and value.ndim else len(value)


@contextmanager
def traceable_len(module: nn.Module) -> Iterator[None]:
    """Context manager in which ``len(x)`` in the code of a network keeps the batch size variable, as ``x.shape[0]`` does.

    The built-in function returns an integer, which a trace stores as a constant.

    Args:
        module: Module whose layers outside of torch are changed.
    """
    functions = [getattr(type(layer).forward, "__globals__", {}) for layer in module.modules()]
    with _LEN_LOCK:
        scopes = [scope for scope in functions if "len" not in scope and not _is_torch(scope)]
        for scope in scopes:
            scope["len"] = _traceable_len
        try:
            yield
        finally:
            for scope in scopes:
                scope.pop("len", None)


def _is_torch(scope: Mapping[str, Any]) -> bool:
    """Returns True for the global names of a module of torch."""
    return str(scope.get("__name__", "")).partition(".")[0] == "torch"
