"""What scheduling policies of the head bring, in virtual time; one figure for each sub-command.

    python -m tools.scheduling --all              # every figure of this subject, and of routing
    python -m tools.scheduling short-behind-long
    python -m tools.scheduling slo                # load that is served within 0.3 s a token
    python -m tools.scheduling slo --kinds trace --trace FILE   # sizes of a trace (Azure's CSV)
    python -m tools.scheduling ratios             # prompts of one to sixteen times the answer
    python -m tools.scheduling preemption         # what becomes of KV that gives way
    python -m tools.scheduling default            # where is skip-join MLFQ worse than fcfs?
    python -m tools.scheduling processes          # the same order of policies in real processes?
    python -m tools.scheduling report             # docs/results/scheduling.md, of all of these

Each writes ``docs/results/scheduling-NAME.json``, or to ``--out``. Requests arrive as a
Poisson process. Their sizes are log-normal: the means are those that the vLLM paper (2023, §6.1)
gives for ShareGPT (161 and 338 tokens) and Alpaca (19 and 58), the spread is assumed
(``requests.SIZES``). *Latency per token* is FastServe's (§6.1): from a request's arrival to its
last token, by its output tokens; ``mean`` and ``p95`` are over requests.
"""
