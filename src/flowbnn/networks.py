"""Networks as modules: copies, evaluation mode, and functions that watch the calls of their layers."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses import FakeTensor
from torch.nn.parameter import is_lazy

from flowbnn.errors import FlowBNNError, describe_value, nearest
from flowbnn.memory import check_memory
from flowbnn.options import checked


def copy_network(
    network: nn.Module,
    advice: str = "use torch.nn.utils.parametrizations.weight_norm",
) -> nn.Module:
    """Returns a deep copy of a network, without the wrappers of ``torch.compile``.

    Args:
        network: Network to copy.
        advice: End of the error message if torch cannot copy it.

    Raises:
        FlowBNNError: If the network is TorchScript, has lazy or meta parameters, or cannot be copied.
    """
    check_copyable(network)
    try:
        return unwrap_compiled(deepcopy_network(network))
    except RuntimeError as error:
        raise _copy_error(str(error).splitlines()[0], advice) from error
    except TypeError as error:  # a lock, a file or a generator
        culprits = [(name, value) for name, value in _attributes(network) if not _can_copy(value)]
        problem = (
            f"attribute '{culprits[0][0]}' is {describe_value(culprits[0][1])}" if culprits else str(error)
        )
        raise _copy_error(problem, "create it in forward, or delete it") from error


def _attributes(network: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields the attributes of all modules that are neither modules nor tensors, with their paths."""
    for prefix, module in network.named_modules():
        for name, value in vars(module).items():
            if name not in ("_parameters", "_buffers", "_modules"):
                yield f"{prefix}.{name}" if prefix else name, value


def _can_copy(value: Any) -> bool:
    """Returns False for an object that Python cannot copy."""
    try:
        deepcopy(value)
    except TypeError:
        return False
    except Exception:  # a tensor with a history
        return True
    return True


def check_copyable(network: nn.Module) -> None:
    """Raises FlowBNNError if a network is TorchScript, or has lazy or meta parameters."""
    for name, module in network.named_modules():
        layer = f"layer '{name}' ({type(module).__name__})" if name else f"a {type(module).__name__}"
        if isinstance(module, torch.jit.ScriptModule):
            raise _copy_error(f"{layer} is TorchScript", "use the original nn.Module")
        for value in module.parameters(recurse=False):
            if is_lazy(value):
                raise _copy_error(f"{layer} is lazy", "call the network once")
            if value.is_meta:
                raise _copy_error(f"{layer} has meta tensors", "load its weights")


def _copy_error(problem: str, advice: str) -> FlowBNNError:
    """Returns the error for a network that cannot be copied."""
    text = f"this network cannot be copied: {problem}; {advice}"
    return FlowBNNError(text, kind="network", argument="network")


def deepcopy_network(
    network: nn.Module, memo: Mapping[int, Any] | None = None, shares_tensors: bool = False
) -> nn.Module:
    """Returns a deep copy of a network.

    Tensors that a forward pass has stored are detached before they are copied, because torch copies no tensors with a history:
    weights that hooks compute (old weight norm, pruning), and attributes such as ``self.features``. Those of a trace are replaced by
    empty tensors.

    Args:
        network: Network.
        memo: Copies of objects by their id, see ``copy.deepcopy``.
        shares_tensors: If True, parameters, buffers and stored tensors are shared instead of copied.

    >>> from torch.nn.utils import prune
    >>> network = prune.identity(nn.Linear(2, 1), "weight")
    >>> deepcopy_network(network)(torch.zeros(1, 2)).shape
    torch.Size([1, 1])
    """
    memo = dict(memo or {})
    for module in network.modules():
        for name, attribute in list(vars(module).items()):  # other threads may store attributes
            # most attributes are flags and empty dictionaries of hooks
            may_have_tensors = isinstance(attribute, Tensor) or (
                isinstance(attribute, dict | list | tuple) and len(attribute) > 0
            )
            if may_have_tensors and name not in ("_parameters", "_buffers", "_modules"):
                for value in _tensors_in(attribute, set()):
                    if is_functorch_wrapped_tensor(value) or isinstance(value, FakeTensor):
                        memo[id(value)] = torch.empty(0)
                    elif not value.is_leaf:
                        memo[id(value)] = value.detach() if shares_tensors else value.detach().clone()
        if shares_tensors:
            tensors = (*module._parameters.values(), *module._buffers.values())
            memo |= {id(tensor): tensor for tensor in tensors if tensor is not None}
    return deepcopy(network, memo)


def _tensors_in(value: Any, visited: set[int]) -> Iterator[Tensor]:
    """Yields the tensors in nested lists, tuples and dictionaries, which may contain themselves.

    Args:
        value: Tensor, container or any other object.
        visited: Ids of the containers that have been read, to which others are added.
    """
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple) and id(value) not in visited:
        visited.add(id(value))
        for entry in list(value.values() if isinstance(value, dict) else value):
            yield from _tensors_in(entry, visited)


def check_copies(network: nn.Module, samples: int) -> None:
    """Raises FlowBNNError if a number of copies of a network does not fit the memory."""
    tensors = [*network.parameters(), *network.buffers()]
    device = tensors[0].device if tensors else torch.device("cpu")
    # sparse tensors have no nbytes
    size = sum([tensor.numel() * tensor.element_size() for tensor in tensors])
    check_memory("samples", samples, samples * size, device)


def unwrap_compiled(network: nn.Module) -> nn.Module:
    """Returns the network that ``torch.compile`` wrapped, and unwraps its submodules in place."""
    for parent in list(network.modules()):
        for name, child in parent._modules.items():  # named_children lists a shared module only once
            if child is not None:
                parent._modules[name] = child._modules.get("_orig_mod", child)
    return network._modules.get("_orig_mod", network)  # type: ignore[return-value]


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Context manager of evaluation mode without gradients, which restores the training mode of every module at its end.

    A ``train`` method that a module overrides is called, because it may do more than set the flag (adapters merge their weights).

    Args:
        model: Network.
    """
    flags, training = [], False
    for module in model.modules():
        flags.append((module, module.training))
        training = training or module.training
    if training:
        model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in flags:
            if module.training != training and type(module).train is not nn.Module.train:
                module.train(training)
        for module, training in flags:
            if module.training != training:
                module.training = training


@contextmanager
def watch_modules(
    modules: Mapping[str, nn.Module],
    before: Callable[..., None] | None,
    after: Callable[..., None] | None,
    unscaled: bool = False,
) -> Iterator[None]:
    """Context manager that calls functions before and after the forward pass of each module.

    Args:
        modules: Modules by name.
        before: Function ``(name, module, args, kwargs)``, or None.
        after: Function ``(name, module, args, kwargs, output)``, or None.
        unscaled: If True, ``after`` gets the output before other hooks, such as that of the units of the targets.
    """
    with ExitStack() as hooks:
        for name, module in modules.items():
            if before is not None:
                hooks.enter_context(module.register_forward_pre_hook(partial(before, name), with_kwargs=True))
            if after is not None:
                hook = partial(after, name)
                hooks.enter_context(module.register_forward_hook(hook, with_kwargs=True, prepend=unscaled))
        yield


OutputSelection = str | int | Callable[[Any], Any]


class SelectOutput:
    """Forward hook that selects the tensor of outputs from what a network returns.

    Args:
        selection: Name of an entry or an attribute, position in a tuple, or function.
    """

    def __init__(self, selection: OutputSelection) -> None:
        self.selection = selection

    def __call__(self, module: nn.Module, args: Any, outputs: Any) -> Any:
        if callable(self.selection):
            return self.selection(outputs)
        name = self.selection
        if isinstance(name, str) and not isinstance(outputs, Mapping) and hasattr(outputs, name):
            return getattr(outputs, name)
        try:
            return outputs[name]
        except (KeyError, IndexError, TypeError):
            names = [str(key) for key in outputs] if isinstance(outputs, Mapping) else []
            text = f"unknown output {name!r} of a {type(outputs).__name__}{nearest(str(name), names)}"
            raise FlowBNNError(text, kind="network", argument="output") from None


@checked
def select_output(network: nn.Module, output: OutputSelection | None) -> nn.Module:
    """Makes a network return one of its outputs, by a hook on the network itself. Its layers keep their names.

    ``.logits`` of an object, ``["logits"]`` of a dictionary, and the first tensor of a tuple are selected without this function.

    Args:
        network: Network, which is changed in place.
        output: Name of an entry or an attribute, position in a tuple, or function of what the network returns. None changes nothing.

    Returns:
        The network.

    >>> network = select_output(nn.LSTM(2, 3, batch_first=True), lambda outputs: outputs[0][:, -1])
    >>> network(torch.zeros(4, 7, 2)).shape
    torch.Size([4, 3])
    """
    if output is None:
        return network
    set_forward_hook(network, SelectOutput(output))
    return network


def set_forward_hook(network: nn.Module, hook: Any) -> None:
    """Adds a forward hook to a network, or replaces the one of the same class, which keeps its place among the hooks."""
    keys = [key for key, other in network._forward_hooks.items() if type(other) is type(hook)]
    if keys:
        network._forward_hooks[keys[0]] = hook
    else:
        network.register_forward_hook(hook)


def output_selection(network: nn.Module) -> OutputSelection | None:
    """Returns the name, the position or the function that :func:`select_output` has set, or None."""
    hooks = [hook for hook in network._forward_hooks.values() if isinstance(hook, SelectOutput)]
    return hooks[0].selection if hooks else None


def set_input_columns(network: nn.Module, columns: Any) -> nn.Module:
    """Stores the names of the columns of the inputs with a network.

    Args:
        network: Network, which is changed in place.
        columns: Names by the path to a data frame among the inputs. Empty or None keeps those that the network has.

    Returns:
        The network.
    """
    if columns and isinstance(columns, Mapping):
        object.__setattr__(network, "_input_columns", dict(columns))
    return network


def input_columns(network: nn.Module) -> dict[str, list[str]]:
    """Returns the names that :func:`set_input_columns` has stored, by the path to a data frame among the inputs."""
    return dict(getattr(network, "_input_columns", {}))


class ModuleCall(NamedTuple):
    """One call of a module in a forward pass.

    Args:
        name: Name of the module.
        inputs: First argument of the call.
        output: Result of the call.
    """

    name: str
    inputs: Any
    output: Any


@contextmanager
def record_calls(modules: Mapping[str, nn.Module]) -> Iterator[list[ModuleCall]]:
    """Context manager that records all calls of some modules, in the order in which they end.

    >>> layers = {"linear": nn.Linear(2, 3)}
    >>> with record_calls(layers) as calls:
    ...     _ = layers["linear"](torch.ones(4, 2))
    >>> [(call.name, call.inputs.shape, call.output.shape) for call in calls]
    [('linear', torch.Size([4, 2]), torch.Size([4, 3]))]
    """
    calls: list[ModuleCall] = []

    def append_call(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        calls.append(ModuleCall(name, next(iter((*args, *kwargs.values())), None), output))

    with watch_modules(modules, None, append_call):
        yield calls
