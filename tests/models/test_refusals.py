import pytest
import torch
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from rllib_llm.models import PackedBatch, build_model
from rllib_llm.models.architecture import Architecture, ArchitectureError
from rllib_llm.models.checkpoint import load_config, model_config
from tests.models.cases import CONFIGS, make_model


def refusal(config) -> str:
    with pytest.raises(ArchitectureError) as caught:
        Architecture.from_config(config)
    return str(caught.value)


def test_all_unsupported_features_are_listed():
    """One message names every feature of a config that would change the computation and is not implemented."""
    values = CONFIGS["llama"]().to_dict() | {
        "model_type": "gemma9",
        "num_experts": 8,
        "hidden_act": "gelu",
        "attention_dropout": 0.1,
        "quantization_config": {"quant_method": "fp8"},
        "sliding_window": 4096,
        "layer_types": ["full_attention", "sliding_attention"],
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "longrope", "rope_theta": 1.0, "factor": 4.0},
    }
    message = refusal(values)
    for part in (
        "9 feature(s)",
        "model_type='gemma9'",
        "num_experts=8",
        "hidden_act='gelu'",
        "attention_dropout=0.1",
        "quant_method='fp8'",
        "sliding_window=4096",
        "sliding_attention",
        "num_attention_heads=3 is not a multiple of num_key_value_heads=2",
        "rope_type='longrope'",
    ):
        assert part in message, part


@pytest.mark.parametrize(
    ("rope", "part"),
    [
        ({"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 2]}, "mrope_section"),
        (
            {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
            "partial_rotary_factor=0.5",
        ),
        ({"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}, "low_freq_factor is missing"),
        ({"full_attention": {"rope_type": "default"}, "sliding_attention": {}}, "differ by layer type"),
    ],
    ids=["unknown-key", "partial", "missing-key", "per-layer"],
)
def test_rope_parameters_that_would_be_ignored_are_refused(rope, part):
    """No rope parameter is silently dropped."""
    assert part in refusal(CONFIGS["llama"]().to_dict() | {"rope_parameters": rope})


def test_older_rope_keys_are_understood():
    """rope_theta / rope_scaling of configs written before transformers 5 mean the same."""
    values = CONFIGS["llama3-rope-biases"]().to_dict()
    rope = values.pop("rope_parameters")
    older = dict(rope)
    values |= {"rope_theta": older.pop("rope_theta"), "rope_scaling": older | {"type": "llama3"}}
    expected = Architecture.from_config(CONFIGS["llama3-rope-biases"]())
    assert Architecture.from_config(values) == expected


def test_sliding_window_matters_only_where_transformers_uses_it():
    """Qwen configs carry a window that may be off; Llama has none; a window as long as the context hides nothing."""
    on = {"sliding_window": 4096, "use_sliding_window": True, "num_hidden_layers": 3, "max_window_layers": 2}
    assert Architecture.from_config(Qwen3Config(**on)).windows == (0, 0, 4096)
    for off in (
        {"use_sliding_window": False},
        {"sliding_window": None},
        {"max_window_layers": 3},
        {"max_position_embeddings": 4096},
    ):
        assert Architecture.from_config(Qwen2Config(**on | off)).windows == ()
    assert "sliding_window=4096" in refusal(LlamaConfig().to_dict() | {"sliding_window": 4096})


def test_head_dim_defaults_follow_transformers():
    """Llama and Qwen2 divide hidden by heads, Qwen3 has 128 unless the config says otherwise."""
    assert Architecture.from_config(LlamaConfig(hidden_size=96, num_attention_heads=4)).head_dim == 24
    qwen3 = Qwen3Config(hidden_size=96, num_attention_heads=4, num_key_value_heads=4).to_dict()
    assert Architecture.from_config(qwen3).head_dim == 128
    assert Architecture.from_config(qwen3 | {"head_dim": None}).head_dim == 128


def test_remote_code_of_a_directory_is_not_executed(tmp_path):
    """A config that points at code of its own (auto_map) does not run it."""
    (tmp_path / "config.json").write_text(
        '{"model_type": "evil", "auto_map": {"AutoConfig": "payload.EvilConfig"}, "hidden_size": 8}'
    )
    (tmp_path / "payload.py").write_text("raise SystemExit('executed')")
    with pytest.raises(ArchitectureError, match="model_type='evil'"):
        load_config(tmp_path)


def test_config_dict_and_config_object_build_the_same_model():
    """A plain dict from config.json is as good as a transformers config."""
    config = CONFIGS["qwen2"]()
    _, from_dict = model_config(config.to_dict())
    assert build_model(from_dict, "bf16").plan.hash == build_model(config, "bf16").plan.hash


def test_positions_beyond_the_context_are_refused():
    """The rotary table is not extrapolated past max_position_embeddings."""
    model = make_model("llama", "bf16")
    with pytest.raises(ValueError, match="max_position_embeddings"):
        model(PackedBatch.from_sequences([[5] * 513]))


def test_a_chunk_without_its_cache_is_refused():
    """Positions that start after 0 need a cache that holds what comes before."""
    model = make_model("llama", "bf16")
    with pytest.raises(ValueError, match="no cache"):
        model(PackedBatch.from_pieces([(torch.tensor([5, 6]), 0), (torch.tensor([5, 6]), 3)]))


def test_sides_refuse_each_others_work():
    """Exporting needs a train side, loading an export a rollout side."""
    train, rollout = make_model("llama", "bf16"), build_model(CONFIGS["llama"](), "bf16", "rollout")
    with pytest.raises(ValueError, match="side 'train'"):
        list(rollout.rollout_tensors())
    with pytest.raises(ValueError, match="side 'rollout'"):
        train.load_rollout_tensors([])
    with pytest.raises(ValueError, match="side 'train'"):
        rollout.initialise(0)
