"""Convergence of HMC on a curve of 100 points and on small UCI tables: R-hat and effective sample size of function values.

    python benchmarks/chain_convergence.py [--sets curve yacht ...] [--starts prior network] [--samples 200] [--seeds 5] [--out FILE]

The network has one hidden layer of 50 units. ``network`` is the default: all chains start near the trained network. With ``prior``
every chain starts from its own draw of the prior, moved to the data, and the length of the trajectories is adapted.
``--samples 0`` draws until the chains agree, as the default does. Any other number of draws is taken once, after 200 transitions of
warm-up. Seeds of tables are splits, whose folder is ``FLOWBNN_DATA``.

The drift is the change of the mean energy between the first and the second half of the draws, in standard deviations of the energy.
With ``--out`` every finished run is written at once, and runs that are in the file are not repeated.
"""

import json
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from common import make_parser
from torch import Tensor

import flowbnn as fb
from flowbnn.data import TensorLoader
from flowbnn.metrics.convergence import split_rhat
from flowbnn.models import MLP
from flowbnn_studies.data.tables import UCI_FOLDERS, load_uci, standardize

STARTS: dict[str, dict[str, Any]] = {"network": {}, "prior": {"spread": None, "steps": None}}


def load(name: str, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns inputs and targets for training and for testing."""
    if name == "curve":
        generator = torch.Generator().manual_seed(seed)
        inputs = 4.0 * torch.rand(600, 1, generator=generator) - 2.0
        targets = torch.sin(2.0 * inputs) + 0.1 * torch.randn(600, 1, generator=generator)
        return inputs[:100], targets[:100], inputs[100:], targets[100:]
    inputs, targets, test_inputs, test_targets = load_uci(name, seed)
    inputs, test_inputs = standardize(inputs, test_inputs)
    return inputs, targets, test_inputs, test_targets


def measure(name: str, start: str, samples: int, seed: int) -> dict[str, Any]:
    """Samples one posterior and returns its diagnostics."""
    inputs, targets, test_inputs, test_targets = load(name, seed)
    torch.manual_seed(seed)
    network = MLP(inputs.shape[1], (50,), 1)
    loader = TensorLoader(inputs, targets, batch_size=32, shuffle=True)
    method = fb.HMC(samples=samples or None, **STARTS[start])
    started = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        posterior = method.fit(network, loader, seed=seed, progress=False)
        seconds = time.process_time() - started
        numbers = fb.evaluate(posterior, (test_inputs, test_targets), progress=False)
    diagnostics, record = posterior.diagnostics(), posterior.record
    assert isinstance(posterior, fb.methods.ChainPosterior)
    outputs = record["outputs"].double()
    first, second = record["energy"].chunk(2, 1)
    return {
        "set": name,
        "start": start,
        "samples": samples,
        "seed": seed,
        "rhat": diagnostics.rhat_outputs,
        "rhat median": float(split_rhat(outputs).median()),
        "rhat density": diagnostics.rhat_density,
        "ess": diagnostics.ess_outputs,
        "drift": float((second.mean() - first.mean()) / record["energy"].std(1).mean()),
        "divergences": diagnostics.divergences,
        "acceptance": diagnostics.acceptance,
        "gradients per transition": diagnostics.gradients,
        "log_likelihood": -numbers["nll"],
        "rmse": numbers["rmse"],
        "cpu seconds": seconds,
    }


def main() -> None:
    parser = make_parser(__doc__, seeds=5)
    parser.add_argument("--sets", nargs="+", choices=["curve", *UCI_FOLDERS], default=["curve", "yacht"])
    parser.add_argument("--starts", nargs="+", choices=list(STARTS), default=list(STARTS))
    parser.add_argument(
        "--samples", type=int, default=200, help="draws per chain; 0 to draw until the chains agree"
    )
    parser.add_argument("--out", type=Path, help="JSON file of the results, which is continued")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    if arguments.out is not None and arguments.out.exists():
        rows = json.loads(arguments.out.read_text())["rows"]
    for name in arguments.sets:
        for seed in range(arguments.seeds):
            for start in arguments.starts:
                key = {"set": name, "start": start, "samples": arguments.samples, "seed": seed}
                if any(key.items() <= row.items() for row in rows):
                    continue
                row = measure(name, start, arguments.samples, seed)
                rows.append(row)
                print(
                    {
                        key: round(value, 3) if isinstance(value, float) else value
                        for key, value in row.items()
                    },
                    flush=True,
                )
                if arguments.out is not None:
                    arguments.out.write_text(
                        json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n"
                    )


if __name__ == "__main__":
    main()
