"""Language models built from precision_kernels operators, for learner and engine."""

from rllib_llm.models.batch import PackedBatch
from rllib_llm.models.causal_lm import CausalLM, build_model
from rllib_llm.models.checkpoint import load_config, load_pretrained, load_tokenizer, save_pretrained
from rllib_llm.models.kv_cache import DecoderCache
from rllib_llm.models.paths import resolve_model_path

__all__ = [
    "CausalLM",
    "DecoderCache",
    "PackedBatch",
    "build_model",
    "load_config",
    "load_pretrained",
    "load_tokenizer",
    "resolve_model_path",
    "save_pretrained",
]
