"""Settings: checked when made, read back as written, and mistakes named in one line."""

import json
import math

import pydantic
import pytest

from translator.checkpoint import CheckpointConfig
from translator.config import (
    PRESETS,
    DecodeConfig,
    ModelConfig,
    apply_setting,
    from_json,
    parse,
    preset,
    to_json,
)
from translator.errors import UserError

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"vocab_size": 4},
        {"vocab_size": "many"},
        {"vocab_size": 10.5},
        {"vocab_size": 10, "d_model": 10, "nhead": 3},
        {"vocab_size": 10, "d_model": 0},
        {"vocab_size": 10, "nhead": 0},
        {"vocab_size": 10, "num_decoder_layers": 0},
        {"vocab_size": 10, "num_encoder_layers": -1},
        {"vocab_size": 10, "dim_feedforward": 0},
        {"vocab_size": 10, "dropout": 1.0},
        {"vocab_size": 10, "dropout": -0.1},
        {"vocab_size": 10, "dropout": NAN},
        {"vocab_size": 10, "activation": "tanh"},
        {"vocab_size": 10, "layer_norm_eps": 0.0},
        {"vocab_size": 10, "layer_norm_eps": INF},
        {"vocab_size": 10, "positions": "x" * 65},
        {"vocab_size": 10, "max_positions": 3},
        {"vocab_size": 10, "d_modle": 8},
    ],
    ids=str,
)
def test_an_impossible_model_is_refused_when_made(values):
    with pytest.raises((pydantic.ValidationError, TypeError)):
        ModelConfig(**values)
    with pytest.raises(UserError, match=r"^here: [^\n]+$"):
        parse(ModelConfig, values, where="here")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"beam_size": 0}, "beam_size = 0: input should be greater than or equal to 1"),
        ({"beam_size": 2.5}, "beam_size = 2.5: input should be a valid integer"),
        ({"n_best": 5}, "n_best 5 is more than beam_size 4; a beam gives at most its size"),
        ({"n_best": 0}, "n_best = 0: input should be"),
        ({"length_penalty": -1}, "length_penalty = -1: input should be"),
        ({"length_penalty": NAN}, "length_penalty = nan: input should be"),
        ({"length_penalty": 1000.0}, "length_penalty = 1000.0: input should be less"),
        ({"max_length_factor": INF}, "max_length_factor = inf: input should be"),
        ({"max_length_factor": -0.5}, "max_length_factor = -0.5: input should be"),
        ({"max_length_extra": 0}, "max_length_extra = 0: input should be"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size = -1: input should be"),
        ({"temperature": 0}, "temperature = 0: input should be"),
        ({"temperature": INF}, "temperature = inf: input should be"),
        ({"temperature": 1e-320}, "temperature = 1e-320: input should be"),
        ({"top_k": -1}, "top_k = -1: input should be"),
        ({"top_p": 0}, "top_p = 0: input should be greater than 0"),
        ({"top_p": 1.1}, "top_p = 1.1: input should be less than or equal to 1"),
        ({"beam_sise": 4}, "unknown key 'beam_sise'; did you mean 'beam_size'?"),
        ({"xyzzy": 4}, "unknown key 'xyzzy'"),
        ([], "Input should be a dictionary"),
        (None, "Input should be a dictionary"),
        ("x", "Input should be a dictionary"),
    ],
    ids=str,
)
def test_impossible_search_settings_say_what_would_be_right(values, message):
    with pytest.raises(UserError) as caught:
        parse(DecodeConfig, values, where="search settings")
    assert str(caught.value).startswith(f"search settings: {message}")
    assert "\n" not in str(caught.value)


def test_sampling_may_give_more_than_a_beam_would():
    assert DecodeConfig(sampling=True, n_best=9).n_best == 9


def test_settings_do_not_change_once_made():
    with pytest.raises(AttributeError):
        DecodeConfig().beam_size = 3


@pytest.mark.parametrize(
    ("factor", "extra", "source", "longest"), [(2.0, 10, 1, 12), (2.0, 10, 40, 90), (0.0, 1, 99, 1), (1.5, 2, 3, 6)]
)
def test_the_longest_target_is_a_function_of_the_source(factor, extra, source, longest):
    assert DecodeConfig(max_length_factor=factor, max_length_extra=extra).max_length(source) == longest


def test_the_most_extreme_settings_stay_finite():
    extreme = DecodeConfig(max_length_factor=1000, length_penalty=10, temperature=0.001)
    assert extreme.max_length(10_000) == 10_000_010
    assert math.isfinite(10_000_010**extreme.length_penalty)


def test_presets_are_known_by_name_and_take_changes():
    assert sorted(PRESETS) == ["small", "tiny", "xianyan"]
    assert preset("small", 8000, dropout=0.2, positions="sinusoidal").dropout == 0.2
    with pytest.raises(UserError, match="unknown model preset 'smal'; known: small, tiny, xianyan"):
        preset("smal", 8000)
    with pytest.raises(UserError, match="preset small: unknown key 'dropuot'; did you mean 'dropout'"):
        preset("small", 8000, dropuot=0.2)
    with pytest.raises(UserError, match="preset small: vocab_size = 2"):
        preset("small", 2)


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("a=1", {"a": 1, "s": {"x": 1}}),
        ("s.x = 2.5", {"s": {"x": 2.5}}),
        ("s.y=true", {"s": {"x": 1, "y": True}}),
        ("t.u.v=[1, 2]", {"s": {"x": 1}, "t": {"u": {"v": [1, 2]}}}),
        ("a=relu", {"a": "relu", "s": {"x": 1}}),
        ('a="1"', {"a": "1", "s": {"x": 1}}),
        ("a=", {"a": "", "s": {"x": 1}}),
        ("a=b=c", {"a": "b=c", "s": {"x": 1}}),
    ],
)
def test_a_setting_is_put_in_its_place(setting, expected):
    values = {"s": {"x": 1}}
    apply_setting(values, setting)
    assert values == expected


@pytest.mark.parametrize("setting", ["a", "", "=1", " =1", "s.x.y=1"])
def test_a_setting_that_is_none_is_refused(setting):
    with pytest.raises(UserError, match=r"^--set "):
        apply_setting({"s": {"x": 1}}, setting)


@pytest.mark.parametrize(
    "config",
    [
        DecodeConfig(beam_size=7, n_best=3, length_penalty=0.6, early_stopping=False, seed=-5),
        preset("xianyan", 16000, positions="sinusoidal"),
        CheckpointConfig(source_language="en", target_language="pt-BR", model=ModelConfig(vocab_size=9)),
    ],
    ids=lambda config: type(config).__name__,
)
def test_json_comes_back_as_it_was(config, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(to_json(config), encoding="utf-8")
    assert from_json(type(config), path) == config
    assert list(json.loads(path.read_text())) == sorted(json.loads(path.read_text()))


@pytest.mark.parametrize(
    "content",
    [None, b"", b"{", b"\xff", b"5", b"[1]", b"null", b"{}", b"[" * 100_000, b'{"vocab_size": ' + b"9" * 5000 + b"}"],
    ids=lambda content: str(content)[:12],
)
def test_a_file_that_is_no_config_is_refused_by_name(content, tmp_path):
    path = tmp_path / "config.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=r"config\.json: [^\n]+$") as caught:
        from_json(ModelConfig, path)
    assert len(str(caught.value)) < 400
