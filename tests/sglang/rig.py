"""The real scheduler of SGLang in this process, with its own event loop; requests come from a callback instead of a socket."""

import os
from array import array
from collections import deque

STRICT = (
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS",
)
"""SGLang checks its accounts at every iteration and raises on a leak."""
LIMIT = 500_000
"""Iterations after which a run that has not ended is stuck."""


class _Stop(Exception):
    pass


class _Sink:
    def __getattr__(self, name):
        return lambda *args, **kwargs: None


class Rig:
    """``options``: server arguments beyond the common ones. ``each``: called at every iteration, before anything is scheduled."""

    def __init__(self, model, options, *, prepare=None):
        for name in STRICT:
            os.environ[name] = "1"
        from sglang.srt.plugins import load_plugins

        load_plugins()
        import cpu

        cpu.install()
        if options.get("speculative_algorithm"):
            cpu.install_speculative()
        if prepare is not None:
            prepare()
        from sglang.srt.managers.scheduler import Scheduler
        from sglang.srt.runtime_context import publish
        from sglang.srt.server_args import PortArgs, ServerArgs

        arguments = {
            "model_path": str(model), "device": "cpu", "load_format": "auto", "attention_backend": "torch_native",
            "sampling_backend": "pytorch", "dtype": "float32", "max_total_tokens": 1024, "context_length": 1024,
            "max_running_requests": 4, "page_size": 16, "disable_overlap_schedule": True, "log_level": "warning",
            "skip_tokenizer_init": True, "random_seed": 1,
        }  # fmt: skip
        server = ServerArgs(**(arguments | options))
        ports = PortArgs.init_new(server)
        publish(server, role="scheduler")
        self.scheduler = Scheduler(server, ports, 0, 0, 0, 0, 0, 0, None)
        self.cache = self.scheduler.tree_cache
        self.each = None
        self.gone = set()
        """Requests that were aborted in the queue: SGLang forgets them unfinished."""
        self._callback = None
        for name in ("send_to_detokenizer", "send_to_tokenizer"):
            object.__setattr__(self.scheduler.ipc_channels, name, _Sink())  # frozen, and held by several parts of the scheduler
        self.scheduler.ingest_requests = self._ingest
        if self.scheduler.enable_overlap:
            self.scheduler.result_queue = deque()  # the loop makes it, and flush_cache reads it before

    def _ingest(self, *args, **kwargs):
        if self.each is not None:
            self.each()
        if self._callback():
            raise _Stop

    def submit(self, rid, tokens, new_tokens=4, **kwargs):
        """Queue a request; returns SGLang's object for it."""
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.sampling.sampling_params import SamplingParams

        sampling = SamplingParams(max_new_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        sampling.normalize(None)
        self.scheduler.handle_generate_request(
            TokenizedGenerateReqInput(
                rid=rid, input_text="", input_ids=array("q", tokens), input_embeds=None, mm_inputs=None, token_type_ids=None,
                sampling_params=sampling, return_logprob=False, logprob_start_len=-1, top_logprobs_num=0, token_ids_logprob=[],
                stream=False, **kwargs,
            )
        )  # fmt: skip
        return next(req for req in reversed(self.scheduler.waiting_queue) if req.rid == rid)

    def abort(self, rid):
        from sglang.srt.managers.io_struct import AbortReq

        self.scheduler.abort_request(AbortReq(rid=rid))

    def loop(self, callback):
        """Run the event loop; ``callback`` once an iteration, until it returns True."""
        count = 0

        def bounded():
            nonlocal count
            count += 1
            assert count < LIMIT, (
                f"no progress: waiting {[req.rid for req in self.scheduler.waiting_queue]}, "
                f"running {[req.rid for req in self.scheduler.running_batch.reqs]}, "
                f"in flight {getattr(self.cache, 'ongoing_write_through', None)} {getattr(self.cache, 'ongoing_load_back', None)}"
            )
            return callback()

        self._callback = bounded
        try:
            self.scheduler.run_event_loop()
        except _Stop:
            return

    def run(self, requests, idle=3):
        """Until all of these are finished, and ``idle`` iterations more in which the scheduler is idle."""
        quiet = 0

        def callback():
            nonlocal quiet
            if all(req.finished() or req.rid in self.gone for req in requests) and self.scheduler.is_fully_idle():
                quiet += 1
            return quiet > idle

        self.loop(callback)

    def generate(self, rid, tokens, new_tokens=4):
        """One request to its end."""
        req = self.submit(rid, tokens, new_tokens)
        self.run([req])
        return req
