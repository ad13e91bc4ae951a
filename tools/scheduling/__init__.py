"""Figures of scheduling policies in virtual time, one per sub-command.

    python -m tools.scheduling --all              # every figure, routing included
    python -m tools.scheduling short-behind-long
    python -m tools.scheduling slo                # load within 0.3 s per token
    python -m tools.scheduling slo --kinds trace --trace FILE   # sizes of a trace (Azure's CSV)
    python -m tools.scheduling ratios             # prompts of 1 to 16 times the answer
    python -m tools.scheduling preemption         # preemption modes
    python -m tools.scheduling processes          # the ranking by real processes
    python -m tools.scheduling report             # write docs/results/scheduling.md

Each writes ``docs/results/scheduling-NAME.json``, or to ``--out``. Requests arrive as a
Poisson process. Their sizes are log-normal: the means are those that the vLLM paper (2023, §6.1)
gives for ShareGPT (161 and 338 tokens) and Alpaca (19 and 58), the spread is assumed
(``requests.SIZES``). *Latency per token* is FastServe's (§6.1): from a request's arrival to its
last token, by its output tokens; ``mean`` and ``p95`` are over requests.
"""
