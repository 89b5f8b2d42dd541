"""Files of posteriors: the header, the tensors of each prefix, and the network, likelihood and history that every file has."""

import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from flowbnn.batches import clone_inputs_of, device_of, first_nonfinite_tensor
from flowbnn.errors import FlowBNNError, optional_import, pluralize
from flowbnn.flattening import flatten_outputs
from flowbnn.likelihoods import Likelihood, make_likelihood
from flowbnn.networks import output_selection, select_output, set_input_columns
from flowbnn.options import File, checked
from flowbnn.records import restore
from flowbnn.regression import LOC, SCALE, set_output_scale
from flowbnn.training import History, check_weights
from flowbnn.training.compatibility import count_weights, warn_changed_layers
from flowbnn.training.storage import TensorFile, describe_tensor
from flowbnn.version import __version__

# dtypes of weights and noise in files
PRECISIONS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def select_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Returns the tensors whose names begin with a prefix and a dot, without the prefix."""
    start = f"{prefix}."
    return {name.removeprefix(start): value for name, value in tensors.items() if name.startswith(start)}


@contextmanager
def rewrap_load_errors(path: Any) -> Iterator[None]:
    """Context manager that re-raises any error as a FlowBNNError about a file that cannot be loaded."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        if isinstance(error, KeyError):
            reason = f"it has no {error}"
        raise FlowBNNError(f"'{path}' cannot be loaded: {reason}", kind="file") from None


def check_shapes(
    tensors: Mapping[str, Tensor], shapes: Mapping[str, Sequence[int]], dtype: torch.dtype | None = None
) -> None:
    """Raises ValueError if tensors of a file do not have these names and shapes, or no floating-point numbers.

    Args:
        tensors: Tensors of the file by name.
        shapes: Shapes by name.
        dtype: Dtype of all tensors. None allows every floating-point dtype.

    >>> check_shapes({"mean": torch.ones(3)}, {"mean": (2,)})
    Traceback (most recent call last):
    ValueError: wrong mean: (3,), torch.float32
    """
    if different := sorted(tensors.keys() ^ shapes.keys()):
        raise ValueError(f"no {different[0]}" if different[0] in shapes else f"unknown tensor {different[0]}")
    for name, shape in shapes.items():
        tensor = tensors[name]
        fits = tensor.dtype.is_floating_point and dtype in (None, tensor.dtype)
        if not fits or tuple(tensor.shape) != tuple(shape):
            raise ValueError(f"wrong {name}: {tuple(tensor.shape)}, {tensor.dtype}")


def list_tensors(tensors: Mapping[str, Tensor]) -> dict[str, list[Any]]:
    """Returns the dtype and the shape of every tensor, for the document of a file.

    >>> list_tensors({"weight": torch.ones(2, 3)})
    {'weight': ['float32', 2, 3]}
    """
    # save_tensors refuses other values
    return {name: describe_tensor(value) for name, value in tensors.items() if isinstance(value, Tensor)}


def check_listed_tensors(file: TensorFile) -> None:
    """Raises FlowBNNError if the tensors of a file are not those that its document lists, with the same dtypes and shapes."""
    listed, stored = file.document.get("tensors"), list_tensors(file.views)
    if not isinstance(listed, Mapping):
        raise FlowBNNError(f"'{file}' is damaged: it has no list of its tensors", kind="file")
    names = [name for name in {**listed, **stored} if listed.get(name) != stored.get(name)]
    if names:
        before, now = (values.get(names[0], "no tensor") for values in (listed, stored))
        text = f"'{file}' is damaged: {names[0]!r:.80} is {now!s:.80}, and was saved as {before!s:.80}"
        raise FlowBNNError(text, kind="file", names=names)


def open_posterior_file(
    path: str | Path | TensorFile, network: nn.Module, kinds: Sequence[str]
) -> TensorFile:
    """Opens the file of a posterior and reads only its header.

    Args:
        path: Path of the file, or an open file.
        network: Network that the posterior was made from.
        kinds: Kinds of posteriors that are accepted.
    """
    file = path if isinstance(path, TensorFile) else TensorFile(path, count_weights(network))
    if file is not path:
        check_listed_tensors(file)
    kind = file.document.get("kind")
    if kind not in kinds:
        expected = f"'{kinds[0]}'" if len(kinds) == 1 else "a posterior"
        raise FlowBNNError(f"'{path}' has the kind '{kind}', expected {expected}", kind="file")
    return file


def read_network(
    model: nn.Module, file: TensorFile, read: bool = True
) -> tuple[nn.Module, Likelihood, History]:
    """Returns the network, the likelihood and the history of a file.

    Args:
        model: Network to read the weights into. It is not changed if they do not fit.
        file: File of a posterior.
        read: If False, only shapes are checked, and the weights of ``model`` are not changed.
    """
    with rewrap_load_errors(file):
        likelihood = make_likelihood(file.document["likelihood"])
        for view in select_prefix(file.views, "likelihood").values():
            if view.dtype in PRECISIONS:
                likelihood.to(view.dtype)
        history = History.from_dict(file.document["history"])
        layers = restore(dict[str, str], file.document["layers"], "layers")
        columns = restore(dict[str, list[Any]] | None, file.document["columns"], "columns")
    if isinstance(output := file.document.get("output"), str | int):
        select_output(model, output)
    elif (name := file.document.get("output_function")) and not callable(output_selection(model)):
        text = f"the posterior selects the outputs of its network by {name}"
        hint = "use load_posterior(path, flowbnn.select_output(network, function))"
        raise FlowBNNError(f"{text}; {hint}", kind="network", argument="network")
    if flattening := file.document.get("flattening"):
        with rewrap_load_errors(file):
            flatten_outputs(model, *map(int, flattening))
    if file.document.get("clones_inputs"):
        clone_inputs_of(model)
    set_input_columns(model, columns)
    likelihood.attach(model)
    modules = {"network": model, "likelihood": likelihood}
    units = [view for name, view in select_prefix(file.views, "network").items() if name in (LOC, SCALE)]
    if len(units) == 2:
        device = device_of(model)
        set_output_scale(model, *(torch.zeros(view.shape, dtype=view.dtype, device=device) for view in units))
    for prefix, module in modules.items():
        check_weights(module, select_prefix(file.views, prefix), file.path)
    if not read:
        return model, likelihood, history
    check_finite_tensors(file)
    warn_changed_layers(model, layers, file)
    for prefix, module in modules.items():
        module.load_state_dict(select_prefix(file.tensors, prefix))
    return model, likelihood, history


def check_finite_tensors(file: TensorFile) -> None:
    """Raises FlowBNNError if a tensor of a file has NaN or infinite values."""
    bad = first_nonfinite_tensor(iter(file.tensors.items()))
    if bad:
        raise FlowBNNError(f"'{file}' is damaged: '{bad}' is not finite", kind="file")


# -------------------- model cards


def model_card(posterior: Any, metrics: Mapping[str, float] | None = None) -> str:
    """Returns a description of a posterior in Markdown, as README files of model repositories have it.

    Args:
        posterior: Posterior of any method.
        metrics: Metrics on held-out data, from :func:`~flowbnn.evaluate`.
    """
    network, history = posterior.model, posterior.history
    weights = f"{sum(value.numel() for value in network.parameters()):,}"
    likelihood, imports, argument = type(posterior.likelihood), "", ""
    if not likelihood.__module__.startswith("flowbnn."):  # the file has no code
        imports = f"\nfrom {likelihood.__module__} import {likelihood.__name__}"
        argument = f", likelihood={likelihood.__name__}"
    lines = [
        "---\nlibrary_name: flowbnn\ntags: [uncertainty, bayesian, calibration]\n---",
        f"# {type(network).__name__} with calibrated uncertainty\n",
        f"- Method: {type(posterior).__name__} (`{posterior.kind}`)",
        f"- Network: {type(network).__name__}, {weights} parameters",
        f"- Likelihood: {likelihood.__name__}",
        f"- Samples: {posterior.default_samples}",
        f"- Training: {pluralize(history.epochs, 'epoch')}, {history.seconds:.0f} s",
        f"- Versions: flowbnn {__version__}, torch {torch.__version__}, Python {platform.python_version()}",
    ]
    if metrics:
        rows = [f"| {name} | {value:.4g} |" for name, value in metrics.items()]
        lines += ["\n## Metrics on held-out data\n", "| metric | value |\n|---|---|", *rows]
    if posterior.calibration is not None:
        lines += ["\n## Calibration\n", f"```\n{posterior.calibration}\n```"]
    lines += [
        "\n## Use\n",
        f"```python\nimport flowbnn as fb{imports}\n",
        "network = ...  # the architecture, with any weights",
        f'posterior = fb.load_posterior("posterior.safetensors", network{argument})',
        "prediction = posterior.predict(inputs, seed=0)\n```\n",
    ]
    return "\n".join(lines)


@checked
def read_card(path: File) -> str:
    """Returns the model card of a file that ``posterior.save`` wrote.

    Args:
        path: Path of the file.

    Raises:
        FlowBNNError: If the file has no card.
    """
    card = TensorFile(path).document.get("card")
    if not isinstance(card, str):
        raise FlowBNNError(f"'{path}' has no card; write it with posterior.save", kind="file")
    return card


def upload(
    posterior: Any, repository: str, metrics: Mapping[str, float] | None, private: bool, api: Any
) -> str:
    """Uploads a posterior and its card to the Hugging Face Hub. Returns the address of the repository.

    Args:
        posterior: Posterior of any method.
        repository: Name of the repository, ``"user/name"``.
        metrics: Metrics on held-out data for the card.
        private: True for a private repository, if it does not exist yet.
        api: Client with ``create_repo`` and ``upload_folder``, or None for ``huggingface_hub.HfApi()``.

    Raises:
        FlowBNNError: If ``huggingface_hub`` is not installed.
    """
    if api is None:
        with optional_import("push_to_hub", "huggingface_hub", "huggingface_hub"):
            from huggingface_hub import HfApi
        api = HfApi()
    with TemporaryDirectory() as folder:
        posterior.save(Path(folder) / "posterior.safetensors", metrics)
        (Path(folder) / "README.md").write_text(model_card(posterior, metrics), encoding="utf-8")
        address = api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Upload posterior")
    return str(address)
