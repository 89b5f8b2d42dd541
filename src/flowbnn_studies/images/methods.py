"""Studies of all methods on images of the published sets: what their settings and their fits have in common."""

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import nn

from flowbnn.candidates import CANDIDATES, Candidate
from flowbnn.data import Augment, Digits, TensorLoader
from flowbnn.methods import Posterior
from flowbnn.options import Count, options
from flowbnn_studies.images.data import known_and_novel, read_images
from flowbnn_studies.images.settings import PictureData
from flowbnn_studies.runner.job import Job
from flowbnn_studies.runner.methods import MethodSettings, MethodStudy, shuffled

SLOW = ("mode-ensemble", "hmc", "nuts")  # which take all data in every step
FAST = tuple(one.key for one in CANDIDATES if one.key not in SLOW)


@options(kw_only=True)
class PictureSettings(PictureData, MethodSettings):
    """The settings of a study of methods on images, besides :class:`PictureData` and :class:`MethodSettings`.

    Args:
        validation: images that are put aside, the same for all seeds.
    """

    validation: Count = 5_000
    methods: tuple[str, ...] = FAST


class PictureStudy(MethodStudy):
    """A study of methods on a published set of images, on a GPU where there is one; subclasses say which set, and what is put aside."""

    data: ClassVar[str]
    accelerator = "auto"

    def novel(self, settings: Any) -> tuple[int, ...]:
        """The classes that training never sees."""
        return ()

    def check(self, settings: Any, jobs: Sequence[Job]) -> None:
        for split in ("train", "test"):
            read_images(self.data, split, settings)

    def parts(self, job: Job) -> Digits:
        """The images, on the device of the job."""
        s: PictureSettings = job.settings
        return known_and_novel(self.data, self.novel(s), s.validation, job.device, s)

    def learned(
        self, job: Job, candidate: Candidate, network: nn.Module, data: Digits, augment: Augment | None = None
    ) -> Posterior:
        """The method's posterior; a training of seconds keeps no checkpoints."""
        images, batch = data.train[0], job.settings.batch
        device = str(images.device.type)
        loader = shuffled(data.train, batch, job.seed, device, drop_last=True, augment=augment)
        method, _ = self.prepared(job, candidate, len(loader))
        held_out = TensorLoader(*data.validation, batch_size=batch) if candidate.held_out else None
        return method.fit(
            network.to(device), loader, validation=held_out, num_data=len(images), **job.brief()
        )
