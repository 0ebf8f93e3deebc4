"""vLLM as the rollout engine: vLLM schedules, pages and samples; the model it runs is the learner's.

`engine` is the handle that `rllib_llm.engines.make_engine("vllm", ...)` gives. The other modules run in the
engine's own
process: `worker` (owns the `vllm.LLM`), `model` (the learner's `CausalLM` with vLLM's paged attention),
`cpu_attention` (the reference attention on vLLM's pages) and `compat` (all that depends on vLLM's version).
"""
