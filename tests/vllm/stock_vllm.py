"""Greedy tokens of vLLM as it comes, in a process of its own: `python stock_vllm.py DIRECTORY PROMPTS.json OUT.json`.

Imports nothing of this project. The caller sets ``VLLM_PLUGINS=""``, so that vLLM loads no plugin either.
"""

import json
import sys
from pathlib import Path

if __name__ == "__main__":
    import torch
    from vllm import LLM, SamplingParams

    directory, prompts, out = sys.argv[1:]
    sizes = {"gpu_memory_utilization": 0.1} if torch.cuda.is_available() else {"enforce_eager": True}
    llm = LLM(
        directory,
        skip_tokenizer_init=True,
        max_model_len=512,
        max_num_seqs=32,
        kv_cache_memory_bytes=1 << 28,
        disable_log_stats=True,
        **sizes,
    )
    answers = llm.generate(
        [{"prompt_token_ids": ids} for ids in json.loads(Path(prompts).read_text())],
        SamplingParams(temperature=0, max_tokens=40, detokenize=False),
        use_tqdm=False,
    )
    loaded = sorted(
        name for name in sys.modules if name.partition(".")[0] in ("rllib_llm", "precision_kernels")
    )
    tokens = [list(a.outputs[0].token_ids) for a in answers]
    Path(out).write_text(json.dumps({"tokens": tokens, "ours": loaded}))
