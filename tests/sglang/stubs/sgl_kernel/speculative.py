"""SGLang's CPU operators of speculative decoding, for chains only (``--speculative-eagle-topk 1``)."""

import ctypes

import torch


def copy_all_layer_kv_cache_cpu(data_ptrs, strides, target_locs, source_locs):
    """Move rows inside every buffer: ``data_ptrs[i]`` is a buffer of rows of ``strides[i]`` bytes."""
    for base, size in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(base + loc * size, size) for loc in source_locs.tolist()]
        for loc, row in zip(target_locs.tolist(), rows, strict=True):
            ctypes.memmove(base + loc * size, row, size)


def _rows(request_rows, table, starts, ends):
    return torch.cat([
        table[row, start:end] for row, start, end in zip(request_rows.tolist(), starts.tolist(), ends.tolist(), strict=True)
    ])  # fmt: skip


def assign_extend_cache_locs_cpu(request_rows, req_to_token, start, end, out_cache_loc, pool_len):
    """The locations of tokens ``start..end`` of each request, one request after another."""
    locs = _rows(request_rows, req_to_token, start, end)
    out_cache_loc[: len(locs)] = locs.to(out_cache_loc.dtype)


def assign_draft_cache_locs_contiguous_cpu(request_rows, req_to_token, seq_lens, out_cache_loc, pool_len, topk, steps):
    """The locations behind each request's tokens that its draft steps write."""
    locs = _rows(request_rows, req_to_token, seq_lens, seq_lens + topk * steps)
    out_cache_loc[: len(locs)] = locs.to(out_cache_loc.dtype)


def build_tree_kernel_efficient_cpu(
    parents, scores, seq_lens, mask, positions, index, next_token, next_sibling, topk, steps, tokens, mask_mode
):
    """The tree of a chain: each token's child is the one after it, and nobody has a sibling. No attention mask is needed."""
    if topk != 1:
        raise NotImplementedError(f"draft trees with topk {topk} are not part of the stand-in")
    requests, offsets = len(seq_lens), torch.arange(tokens)
    positions.copy_((seq_lens[:, None] + offsets).reshape(-1))
    index.copy_(torch.arange(requests * tokens).view(requests, tokens))
    next_token.copy_(torch.where(offsets + 1 < tokens, offsets + 1, -1).expand(requests, tokens))
    next_sibling.fill_(-1)


def verify_tree_greedy_cpu(
    predicts, accept_index, accept_token_num, candidates, retrive_index, retrive_next_token, retrive_next_sibling, target_predict
):
    """Follow each chain while the draft's token is the target's; ``predicts`` holds the target's tokens, bonus included."""
    wanted = target_predict.view_as(candidates)
    for request, (drafted, target) in enumerate(zip(candidates.tolist(), wanted.tolist(), strict=True)):
        right = 0
        while right + 1 < accept_index.shape[1] and drafted[right + 1] == target[right]:
            right += 1
        at = retrive_index[request, : right + 1]
        accept_index[request, : right + 1] = at.to(accept_index.dtype)
        predicts[at] = wanted[request, : right + 1].to(predicts.dtype)
        accept_token_num[request] = right


def fill_bonus_tokens_cpu(accept_tokens, accept_lens, bonus_tokens, stride):
    """Each request's last accepted token."""
    last = torch.arange(len(accept_lens)) * stride + accept_lens.to(torch.int64) - 1
    bonus_tokens.copy_(accept_tokens.reshape(-1)[last].to(bonus_tokens.dtype))
