"""Runs or warms up a worker once its stage is known."""

import asyncio
from functools import partial
from pathlib import Path

import torch

from molink.checkpoint.model_folder import ModelFolder
from molink.stage.warm_up import warm_up
from molink.wire.messages.worker_pipe import LoadStage, WarmUp, WeightLoadProgress
from molink.wire.sockets.event_loop import EventLoop
from molinkd.worker.daemon_pipe import DaemonPipe
from molinkd.worker.engine_loader import load_engine
from molinkd.worker.worker import Worker


def run_worker(start: LoadStage, pipe: DaemonPipe) -> None:
    """Run a stage until the daemon ends it.

    Raises:
        MolinkError: the stage can't be loaded or run; the error was sent on the pipe.
    """
    if start.threads:
        torch.set_num_threads(start.threads)

    def on_progress(done: int, total: int) -> None:
        pipe.send(WeightLoadProgress(done=done, total=total))

    # ZeroMQ sockets need a selector loop on Windows; all systems use the same one.
    with asyncio.Runner(loop_factory=EventLoop) as runner:
        runner.run(Worker(start, pipe, partial(load_engine, on_progress=on_progress)).run())


def warm_up_worker(warm: WarmUp) -> None:
    """Compile and try out the kernels that a stage like ``warm`` needs.

    A GPU is left alone: the stage that runs on it needs all of its memory.

    Raises:
        MolinkError: no such stage can be loaded.
    """
    if warm.device != "cpu" or not warm.model_dir:
        return
    if warm.threads:
        torch.set_num_threads(warm.threads)
    folder = ModelFolder.open(Path(warm.model_dir), warm.layers)
    how = warm.dtype, warm.quantize, warm.kv_cache_dtype
    warm_up(folder, warm.layers, *how, warm.block_size)
