"""Does the precision of rollout and training change what is learned when answers are long? See docs/long_answers.md.

    python -m benchmarks.long_answers pretrain --out MODEL          # from the root of the repository
    python -m benchmarks.long_answers study --model MODEL --seeds 0 --out PART0    # one process for each seed
    python -m benchmarks.long_answers merge PART0 PART1 PART2 --out RESULTS

`task` makes problems, `pretrain` the model, `sampler` decodes many cells at once on one GPU, `cell` is one arm with
one seed, `study` runs all cells in lockstep and writes the curves that ``rllib-llm report`` reads.
"""
