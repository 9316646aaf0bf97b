"""What SGLang's CPU path lacks on a machine without a GPU and without its CPU operators. Nothing here knows of cphicache."""

from copy import copy

import torch


class _Kernel:
    """``kernel[grid](...)`` calls a function."""

    def __init__(self, function):
        self._function = function

    def __getitem__(self, grid):
        return self._function


def _alloc_extend(prefix_lens, seq_lens, last_locs, free_pages, out, batch_bound, page_size):
    from sglang.srt.mem_cache.allocator.paged import alloc_extend_naive

    alloc_extend_naive(prefix_lens, seq_lens, last_locs, free_pages, out, page_size, out.device)


def _alloc_decode(seq_lens, last_locs, free_pages, out, batch_bound, page_size):
    taken = 0
    for index, (length, last) in enumerate(zip(seq_lens.tolist(), last_locs.tolist(), strict=True)):
        if (length - 1) % page_size:
            out[index] = last + 1
        else:
            out[index] = free_pages[taken] * page_size
            taken += 1


def install() -> None:
    """Call before the scheduler is made."""
    from sglang.srt.mem_cache.allocator import paged
    from sglang.srt.models.deepseek_common import attention_backend_handler as handler

    paged.alloc_extend_kernel = _Kernel(_alloc_extend)
    paged.alloc_decode_kernel = _Kernel(_alloc_decode)
    # torch_native reads K and V back from the latent pool, so that it needs the absorbed form also for a prefill without a prefix.
    handler.AttentionBackendRegistry.register("torch_native", lambda attention, batch: handler.AttnForwardMethod.MLA)
    torch.set_num_threads(1)


class _Steps:
    """The draft model's attention backends, one a step, which need no preparation."""

    def __init__(self, backends):
        self.attn_backends = backends

    def init_forward_metadata(self, forward_batch):
        pass


def install_speculative() -> None:
    """``torch_native`` for the draft model, and for the forward that verifies its tokens. Call before the scheduler is made."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.models.deepseek_v2 import DeepseekV2DecoderLayer
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    def create_backend(factory, name, backend_map, error_template, stamps_children=False):
        count = factory.speculative_num_steps if stamps_children else 1
        backends = [TorchNativeAttnBackend(factory.draft_model_runner) for _ in range(count)]
        for backend in backends:
            backend.prefill_attention_backend_str = backend.decode_attention_backend_str = "torch_native"
        return _Steps(backends) if stamps_children else backends[0]

    extend = TorchNativeAttnBackend.forward_extend

    def forward_extend(backend, q, k, v, layer, forward_batch, *args, **kwargs):
        if forward_batch.forward_mode.is_target_verify():  # an extend by the same number of tokens for each request
            count = q.shape[0] // forward_batch.seq_lens.shape[0]
            forward_batch = copy(forward_batch)
            forward_batch.extend_prefix_lens = forward_batch.seq_lens
            forward_batch.extend_seq_lens = torch.full_like(forward_batch.seq_lens, count)
            forward_batch.seq_lens = forward_batch.seq_lens + count
        return extend(backend, q, k, v, layer, forward_batch, *args, **kwargs)

    DraftBackendFactory._create_backend = create_backend
    TorchNativeAttnBackend.forward_extend = forward_extend
    # The draft layer of a DeepSeek model is made of experts, whose kernels a CPU lacks: a dense one serves as well.
    DeepseekV2DecoderLayer._is_layer_sparse = lambda layer, layer_id, is_nextn=False: False
    torch.cuda.synchronize = torch.cuda.empty_cache = lambda *args, **kwargs: None  # the draft model's loader calls them
