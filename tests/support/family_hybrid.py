"""Families that mix attention with recurrent layers (linear attention, Mamba, convolutions)."""

from __future__ import annotations

from tests.support.family_attention import GRANITE
from tests.support.family_base import BASE, EXPERTS, case
from tests.support.family_mla import MLA

LINEAR_ATTENTION = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "num_experts": EXPERTS,
    "decoder_sparse_step": 1,
    "shared_expert_intermediate_size": 64,
    "full_attention_interval": 4,
}
QWEN35 = LINEAR_ATTENTION | {
    "rope_parameters": {
        "type": "default",
        "mrope_section": [2, 3, 3],
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
    },
}
BAILING = {
    "num_experts": EXPERTS,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "layer_group_size": 4,
    "group_norm_size": 2,
    "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "routed_scaling_factor": 1.5,
    "use_qk_norm": True,
    "partial_rotary_factor": 0.5,
}
KIMI = MLA | {
    "q_lora_rank": None,
    "linear_attn_config": {
        "kda_layers": [1, 2, 3],
        "full_attn_layers": [4],
        "num_heads": 4,
        "head_dim": 32,
        "short_conv_kernel_size": 4,
    },
    "model_max_length": 4096,
    "num_experts": EXPERTS,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "num_expert_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
}
KIMI_K3 = KIMI | {
    "model_type": "kimi_linear",
    "activation_situ_beta": 1.0,
    "activation_situ_linear_beta": 1.0,
    "attn_res_block_size": 2,
    "mla_use_output_gate": True,
    "q_lora_rank": 64,
    "routed_expert_hidden_size": 64,
    "latent_moe_use_norm": True,
}
TAGS = ("hybrid", "recurrent")

CASES = [
    case(
        "qwen3_next",
        LINEAR_ATTENTION | {"mlp_only_layers": [], "partial_rotary_factor": 0.5},
        *TAGS,
        "shared_expert",
    ),
    case("qwen3_5_moe", {"text_config": BASE | QWEN35}, *TAGS, "shared_expert", "vl", base={}),
    case("qwen3_5", {"text_config": BASE | QWEN35}, *TAGS, "shared_expert", "vl", base={}),
    case(
        "jamba",
        {
            "attn_layer_offset": 1,
            "attn_layer_period": 2,
            "expert_layer_offset": 1,
            "expert_layer_period": 2,
            "mamba_d_conv": 4,
            "mamba_d_state": 8,
            "mamba_expand": 2,
            "num_experts": EXPERTS,
            "intermediate_size": 64,
        },
        *TAGS,
        notes="its Mamba is a python loop over tokens: long prompts build huge graphs",
    ),
    case(
        "granitemoehybrid",
        GRANITE
        | {
            "layer_types": ["mamba", "attention", "mamba", "attention"],
            "shared_intermediate_size": 64,
            "mamba_n_heads": 8,
            "mamba_d_head": 32,
            "mamba_proj_bias": False,
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
            "mamba_n_groups": 1,
            "mamba_conv_bias": True,
            "position_embedding_type": "nope",
        },
        *TAGS,
        "shared_expert",
    ),
    case(
        "nemotron_h",
        {
            "mamba_num_heads": 8,
            "mamba_head_dim": 32,
            "mamba_proj_bias": False,
            "ssm_state_size": 16,
            "conv_kernel": 4,
            "n_groups": 2,
            "mlp_bias": False,
            "layer_norm_epsilon": 1e-5,
            "use_bias": False,
            "use_conv_bias": True,
            "hybrid_override_pattern": ["M", "E", "*", "E", "M", "-", "E"],
            "num_hidden_layers": 7,
            "moe_shared_expert_intermediate_size": 64,
            "n_routed_experts": EXPERTS,
            "n_shared_experts": 1,
            "n_group": 2,
            "topk_group": 1,
            "routed_scaling_factor": 1.5,
        },
        *TAGS,
        "mlp",
        "shared_expert",
        notes="SwitchMLP experts are layers of their own, with no cache",
    ),
    case(
        "lfm2_moe",
        {
            "num_experts": EXPERTS,
            "use_expert_bias": True,
            "num_dense_layers": 1,
            "norm_eps": 1e-5,
            "conv_bias": False,
            "conv_L_cache": 3,
            "layer_types": ["conv", "full_attention", "conv", "full_attention"],
        },
        *TAGS,
        "dense_first",
    ),
    case("kimi_linear", KIMI, *TAGS, "mla", "array_mask", "dense_first", "shared_expert"),
    case(
        "kimi_k3",
        {"text_config": BASE | KIMI_K3},
        *TAGS,
        "mla",
        "array_mask",
        "dense_first",
        "shared_expert",
        "vl",
        "latent",
        base={},
        notes="experts work on a 64-wide latent; residual streams cross blocks of 2 layers",
    ),
    case("bailing_moe_linear", BAILING, *TAGS, "dense_first", "shared_expert"),
    case(
        "bailing_hybrid",
        BAILING | MLA,
        *TAGS,
        "mla",
        "array_mask",
        "dense_first",
        "shared_expert",
    ),
    case(
        "bailing_moe_v3",
        BAILING
        | MLA
        | {
            "model_type": "bailing_hybrid",
            "architectures": ["BailingMoeV3ForCausalLM"],
            "moe_shared_expert_intermediate_size": 64,
            "short_conv_kernel_size": 4,
            "head_dim": 32,
        },
        *TAGS,
        "mla",
        "array_mask",
        "dense_first",
        "shared_expert",
        notes="chosen by `architectures`; its model_type is bailing_hybrid",
    ),
]
