"""Tests of transformers: models and loaders of a Trainer, and its callbacks."""

import pytest
import torch
from tiny_models import arguments, images, make_bert, make_vit, texts
from transformers import Trainer

import flowbnn as fb
from flowbnn.errors import FlowBNNError
from flowbnn.integrations.huggingface import CalibrationCallback, NoiseCallback

pytestmark = pytest.mark.filterwarnings("ignore::flowbnn.FlowBNNWarning")
TASKS = {"text": (make_bert, texts), "image": (make_vit, images)}
RECIPE = fb.noise.NormalAffine(base_scale=0.3)


@pytest.mark.parametrize("task", TASKS)
def test_model_and_loader_of_a_trainer(task, tmp_path):
    make_model, make_data = TASKS[task]
    callback = CalibrationCallback(make_data(), candidates=["temperature"], progress=False)
    data = make_data()
    trainer = Trainer(
        make_model(), arguments(tmp_path), train_dataset=data, eval_dataset=data, callbacks=[callback]
    )
    trainer.train()
    loader = trainer.get_eval_dataloader()
    posterior = fb.calibrate(trainer.model, loader, candidates=["temperature"], progress=False)
    assert posterior.predict(loader).probabilities.shape == (48, 2)
    nll, expected = (fb.evaluate(each, loader)["nll"] for each in (posterior, callback.posterior))
    assert nll == pytest.approx(expected, abs=1e-4)
    noisy = fb.to_stochastic(trainer.model, {"*": RECIPE})
    fitted = fb.fit(noisy, loader, epochs=1, report=False, progress=False, validation=None)
    assert fitted.predict(loader, 3).probabilities.shape == (48, 2)


def test_noise_is_trained_with_its_kl(tmp_path):
    callback = NoiseCallback(warmup=0.2)
    model = fb.to_stochastic(make_bert(), {"*": RECIPE})
    settings = arguments(tmp_path, gradient_accumulation_steps=2, save_strategy="epoch")
    trainer = Trainer(model, settings, train_dataset=texts(), callbacks=[callback])
    trainer.train()
    assert callback.term.num_data == 48
    assert len(callback.term.history) == trainer.state.global_step == 6
    posterior = callback.posterior(trainer.model, texts())
    assert posterior.predict(texts(), 3).probabilities.shape == (48, 2)
    with pytest.raises(FlowBNNError) as caught:
        trainer.model.save_pretrained(tmp_path / "model")
    assert caught.value.kind == "save"


def test_model_without_noise_and_scaled_gradients_are_refused(tmp_path):
    with pytest.raises(FlowBNNError) as caught:
        Trainer(make_bert(), arguments(tmp_path), train_dataset=texts(), callbacks=[NoiseCallback()]).train()
    assert caught.value.argument == "model"
    settings = arguments(tmp_path, max_grad_norm=0.0)
    settings.fp16 = True
    with pytest.raises(FlowBNNError) as caught:
        NoiseCallback().on_train_begin(settings, None, None, model=torch.nn.Linear(1, 1))
    assert caught.value.kind == "precision"
