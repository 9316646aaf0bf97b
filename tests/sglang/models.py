"""Makes the tiny models that the tests serve.  Usage: models.py FOLDER   (writes FOLDER/llama, FOLDER/mla, ...)

Their weights are random, and large enough that the tokens depend on every part of the KV: with weights near zero a wrong cache would
give the same tokens as a right one.

The models with a draft are made so that the draft often finds the right token, and finds it from its own KV: the draft is the target's
first layer on the embedding of the token that it is given, and the target's other layers add little to what its first one says.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

COMMON = {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 512, "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2,
    "tie_word_embeddings": False, "torch_dtype": "float32", "attention_bias": False,
}  # fmt: skip
LLAMA = {
    **COMMON, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 4, "num_key_value_heads": 2,
    "head_dim": 16, "mlp_bias": False,
}  # fmt: skip
MLA = {
    **COMMON, "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "num_hidden_layers": 3,
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 3, "moe_layer_freq": 1,
    "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "topk_method": "greedy",
    "scoring_func": "softmax", "norm_topk_prob": False,
    "rope_scaling": {
        "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
}  # fmt: skip
MTP = {
    **MLA, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_nextn_predict_layers": 1,
    "topk_method": "noaux_tc", "scoring_func": "sigmoid",
}  # fmt: skip
GAIN = 1.5
LATER_LAYERS = 0.2
"""What the layers after the first add to the residual stream of a model with a draft, over what they would add."""


def weights_of(where: Path, config, seed: int) -> dict[str, torch.Tensor]:
    where.mkdir(parents=True, exist_ok=True)
    (where / "config.json").write_text(json.dumps(config, indent=1))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(where), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0.0, GAIN / parameter.shape[-1] ** 0.5)
    return {key: value.clone().contiguous() for key, value in model.state_dict().items()}


def save(where: Path, weights) -> None:
    save_file(weights, where / "model.safetensors", metadata={"format": "pt"})


def easy_to_draft(weights) -> dict[str, torch.Tensor]:
    """Weights whose first layer says almost all, on embeddings that its norm leaves as they are."""
    embedding = weights["model.embed_tokens.weight"]
    embedding.div_(embedding.square().mean(-1, keepdim=True).sqrt())
    for name, weight in weights.items():
        if name.startswith("model.layers.") and ".layers.0." not in name and ("o_proj" in name or "down_proj" in name):
            weight.mul_(LATER_LAYERS)
    return weights


def token_only(hidden: int) -> torch.Tensor:
    """A projection of (embedding, hidden state) that takes the embedding."""
    return torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], dim=1)


def make_llama_with_drafts(folder: Path) -> None:
    """A target, an EAGLE draft for it, and a smaller model that drafts for it alone."""
    weights = easy_to_draft(weights_of(folder / "drafted", LLAMA, 2))
    save(folder / "drafted", weights)
    first = {name: weight for name, weight in weights.items() if ".layers." not in name or ".layers.0." in name}
    small = folder / "standalone"
    small.mkdir(exist_ok=True)
    (small / "config.json").write_text(json.dumps({**LLAMA, "num_hidden_layers": 1}, indent=1))
    save(small, first)
    eagle = folder / "eagle"
    eagle.mkdir(exist_ok=True)
    config = {**LLAMA, "architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1}
    (eagle / "config.json").write_text(json.dumps(config, indent=1))
    layer = {
        name.removeprefix("model."): weight
        for name, weight in first.items()
        if (".layers.0." in name and "input_layernorm" not in name) or "embed_tokens" in name
    }
    hidden = LLAMA["hidden_size"]
    save(eagle, layer | {"fc.weight": token_only(hidden), "fc.bias": torch.zeros(hidden)})


def make_mla_with_mtp(folder: Path) -> None:
    """A model that brings its draft layer along (multi-token prediction, NextN)."""
    weights = easy_to_draft(weights_of(folder / "mtp", MTP, 3))
    hidden, draft = MTP["hidden_size"], f"model.layers.{MTP['num_hidden_layers']}."
    for name, weight in list(weights.items()):
        if name.startswith("model.layers.0."):
            weights[draft + name.removeprefix("model.layers.0.")] = weight.clone()
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        weights[f"{draft}{norm}.weight"] = torch.ones(hidden)
    weights[f"{draft}eh_proj.weight"] = token_only(hidden)
    weights[f"{draft}embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    weights[f"{draft}shared_head.head.weight"] = weights["lm_head.weight"].clone()
    save(folder / "mtp", weights)


def make(folder: Path) -> None:
    for seed, (name, config) in enumerate((("llama", LLAMA), ("mla", MLA))):
        save(folder / name, weights_of(folder / name, config, seed))
    make_llama_with_drafts(folder)
    make_mla_with_mtp(folder)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
