"""Tests of the methods and settings that the page offers."""

import pytest

import flowbnn as fb
from flowbnn.errors import FlowBNNError
from flowbnn_studies.playground.methods import ENTRIES, NOISES, Choice, FitSettings, describe_entries


@pytest.mark.parametrize("name", ENTRIES)
def test_defaults_and_limits_make_methods(name):
    """Every method accepts the default, the smallest and the largest value of each setting."""
    default = FitSettings.parse({"method": name})
    for setting in (*default.entry.settings, *[]):
        ends = setting.choices if isinstance(setting, Choice) else (setting.low, setting.high)
        for end in ends:
            value = end if isinstance(setting, Choice) or not setting.is_integer else int(end)
            changed = FitSettings.parse({"method": name, "values": {setting.name: value}})
            assert changed.values[setting.name] == value
            changed.method()
    assert default.hidden == (32, 32)
    assert default.values["epochs"] == 200


def test_settings_reach_the_method():
    values = {"noise": "planar", "length": 5, "noise_prior": 0.7, "epochs": 30, "lr": 0.02, "beta": 0.5}
    method = FitSettings.parse({"method": "noise", "values": values}).method()
    assert method == fb.NodeNoise(fb.noise.NormalPlanar(5, prior_scale=0.7), epochs=30, lr=0.02, beta=0.5)
    recipes = {
        name: FitSettings.parse({"method": "noise", "values": {"noise": name}}).method().kind
        for name in NOISES
    }
    assert recipes["joint"].joint == "full"
    assert recipes["mixture"].components == 8
    assert type(recipes["sylvester"]) is fb.noise.NormalSylvester
    members = FitSettings.parse({"method": "ensemble", "values": {"members": 3}}).method()
    assert members == fb.DeepEnsemble(3, epochs=200, lr=0.01)
    temperature = FitSettings.parse({"method": "temperature"}).method()
    assert temperature == fb.Temperature(fb.MAP(epochs=200, lr=0.01), validation_fraction=0.25)


@pytest.mark.parametrize(
    ("document", "argument"),
    [
        (None, "settings"),
        ({"values": {}}, "settings"),
        ({"method": ["map"]}, "settings"),
        ({"method": "map", "values": []}, "settings"),
        ({"method": "mapp"}, "method"),
        ({"method": "map", "values": {"epoch": 3}}, "values"),
        ({"method": "map", "values": {"epochs": 1_000_000}}, "epochs"),
        ({"method": "map", "values": {"epochs": 20.5}}, "epochs"),
        ({"method": "map", "values": {"epochs": True}}, "epochs"),
        ({"method": "map", "values": {"lr": float("nan")}}, "lr"),
        ({"method": "map", "values": {"lr": "fast"}}, "lr"),
        ({"method": "noise", "values": {"noise": "pink"}}, "noise"),
        ({"method": "noise", "values": {"noise": ["planar"]}}, "noise"),
    ],
)
def test_invalid_settings_are_refused(document, argument):
    with pytest.raises(FlowBNNError) as caught:
        FitSettings.parse(document)
    assert caught.value.argument == argument
    assert "\n" not in str(caught.value)


def test_the_page_gets_every_setting_with_its_limits():
    for entry in describe_entries():
        assert {setting["name"] for setting in entry["settings"]} == set(
            FitSettings.parse({"method": entry["name"]}).values
        )
        for setting in entry["settings"]:
            assert setting["label"]
            assert setting["help"].endswith(".")
            assert "choices" in setting or setting["low"] <= setting["default"] <= setting["high"]
