"""What SGLang's CPU path lacks on a machine without a GPU and without its CPU operators. Nothing here knows of cphicache."""

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
