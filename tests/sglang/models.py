"""Makes the tiny models that the tests serve.  Usage: models.py FOLDER   (writes FOLDER/llama and FOLDER/mla)

Their weights are random, and large enough that the tokens depend on every part of the KV: with weights near zero a wrong cache would
give the same tokens as a right one.
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
MODELS = {
    "llama": {
        **COMMON, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 4, "num_key_value_heads": 2,
        "head_dim": 16, "mlp_bias": False,
    },
    "mla": {
        **COMMON, "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "num_hidden_layers": 3,
        "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
        "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 3, "moe_layer_freq": 1,
        "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "topk_method": "greedy",
        "scoring_func": "softmax", "norm_topk_prob": False,
        "rope_scaling": {
            "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707,
            "mscale_all_dim": 0.707,
        },
    },
}  # fmt: skip
GAIN = 1.5


def make(folder: Path) -> None:
    for seed, (name, config) in enumerate(MODELS.items()):
        where = folder / name
        where.mkdir(parents=True, exist_ok=True)
        (where / "config.json").write_text(json.dumps(config, indent=1))
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(where), dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() >= 2:
                    parameter.normal_(0.0, GAIN / parameter.shape[-1] ** 0.5)
        weights = {key: value.contiguous() for key, value in model.state_dict().items()}
        save_file(weights, where / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    make(Path(sys.argv[1]))
