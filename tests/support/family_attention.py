"""Families with plain full attention (one KV cache a layer)."""

from __future__ import annotations

from tests.support.family_base import BASE, EXPERT_HIDDEN, EXPERTS, VOCAB, case

GLM4 = {
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
    "rope_scaling": None,
    "use_qk_norm": True,
    "partial_rotary_factor": 0.5,
}
GRANITE = {
    "logits_scaling": 2.0,
    "attention_multiplier": 0.17,
    "embedding_multiplier": 0.5,
    "residual_multiplier": 0.7,
    "num_local_experts": EXPERTS,
    "intermediate_size": EXPERT_HIDDEN,
}
QWEN3 = {"num_experts": EXPERTS, "decoder_sparse_step": 1, "mlp_only_layers": [1]}
MINIMAX_M3 = {
    "num_local_experts": EXPERTS,
    "intermediate_size": EXPERT_HIDDEN,
    "dense_intermediate_size": 192,
    "shared_intermediate_size": 64,
    "moe_layer_freq": [0, 1, 1, 1],
    "routed_scaling_factor": 2.0,
    "sparse_attention_config": {
        "sparse_num_index_heads": 2,
        "sparse_index_dim": 32,
        "sparse_block_size": 8,
        "sparse_topk_blocks": 4,
        "sparse_local_block": 1,
        "sparse_attention_freq": [0, 1, 0, 1],
    },
}

CASES = [
    case("qwen3_moe", QWEN3),
    case(
        "qwen3_vl_moe", {"text_config": BASE | QWEN3 | {"model_type": "qwen3_moe"}}, "vl", base={}
    ),
    case(
        "qwen2_moe",
        {"num_experts": EXPERTS, "shared_expert_intermediate_size": 64},
        "shared_expert",
    ),
    case("mixtral", {"num_local_experts": EXPERTS, "intermediate_size": EXPERT_HIDDEN}),
    case("olmoe", {"num_experts": EXPERTS, "intermediate_size": EXPERT_HIDDEN}),
    case(
        "phimoe",
        {
            "num_local_experts": EXPERTS,
            "intermediate_size": EXPERT_HIDDEN,
            "original_max_position_embeddings": 4096,
            "rope_scaling": {
                "type": "longrope",
                "long_factor": [1.5] * 16,
                "short_factor": [1.0] * 16,
                "long_mscale": 1.0,
                "short_mscale": 1.0,
            },
        },
        "bias",
    ),
    case(
        "phixtral",
        {
            "num_vocab": VOCAB,
            "model_dim": 128,
            "num_heads": 4,
            "num_layers": 4,
            "rotary_dim": 16,
            "num_experts_per_tok": 2,
            "num_local_experts": EXPERTS,
        },
        "mlp",
        "expert_bias",
        base={},
        notes="SwitchMLP (fc1, fc2); expert width is 4 x hidden",
    ),
    case(
        "deepseek",
        {
            "n_routed_experts": EXPERTS,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "num_key_value_heads": 4,
        },
        "dense_first",
        "shared_expert",
    ),
    case(
        "dots1",
        {
            "n_routed_experts": EXPERTS,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.5,
        },
        "dense_first",
        "shared_expert",
    ),
    case("glm4_moe", GLM4, "dense_first", "shared_expert"),
    case("solar_open", GLM4, "dense_first", "shared_expert"),
    case(
        "ernie4_5_moe",
        {
            "use_bias": False,
            "moe_num_experts": EXPERTS,
            "moe_k": 2,
            "moe_layer_start_index": 1,
            "moe_num_shared_experts": 1,
            "moe_gate_act": "sigmoid",
        },
        "dense_first",
        "shared_expert",
    ),
    case("granitemoe", GRANITE),
    case(
        "Klear",
        {
            "num_experts": EXPERTS,
            "mlp_only_layers": [0],
            "decoder_sparse_step": 1,
            "n_shared_experts": 1,
        },
        "dense_first",
        "shared_expert",
    ),
    case(
        "hunyuan",
        {
            "moe_topk": 2,
            "num_experts": EXPERTS,
            "num_shared_expert": 1,
            "use_mixed_mlp_moe": True,
            "use_qk_norm": True,
            "use_cla": True,
            "cla_share_factor": 2,
            "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"},
        },
        "shared_expert",
        "shared_kv",
        notes="every second layer reuses the keys and values of the one before",
    ),
    case(
        "bailing_moe",
        {
            "num_experts": EXPERTS,
            "num_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 2,
            "topk_group": 1,
            "score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "routed_scaling_factor": 1.5,
            "use_qk_norm": True,
            "partial_rotary_factor": 0.5,
        },
        "dense_first",
        "shared_expert",
    ),
    case(
        "minimax",
        {
            "num_local_experts": EXPERTS,
            "intermediate_size": EXPERT_HIDDEN,
            "shared_intermediate_size": 0,
            "rotary_dim": 16,
        },
    ),
    case(
        "minimax_m3_vl",
        {"text_config": BASE | MINIMAX_M3},
        "vl",
        "dense_first",
        "shared_expert",
        "sparse_attention",
        base={},
        notes="block-sparse attention on layers 1 and 3 drops keys from 33 tokens on",
    ),
]
