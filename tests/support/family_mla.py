"""Families with multi-head latent attention; most build full array masks."""

from __future__ import annotations

from tests.support.family_base import BASE, EXPERTS, case

MLA = {
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "num_key_value_heads": 4,
}
DEEPSEEK = MLA | {
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.5,
    "n_group": 2,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
}
INDEXER = {"index_head_dim": 32, "index_n_heads": 2, "index_topk": 24}
MISTRAL4 = DEEPSEEK | {
    "head_dim": 48,
    "rope_parameters": {
        "type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}
LONGCAT = {
    "zero_expert_type": "identity",
    "attention_method": "MLA",
    "ffn_hidden_size": 192,
    "moe_topk": 2,
    "expert_ffn_hidden_size": 64,
    "n_routed_experts": EXPERTS,
    "zero_expert_num": 2,
    "num_layers": 3,
    "routed_scaling_factor": 1.5,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
} | MLA
TAGS = ("mla", "dense_first", "shared_expert")

CASES = [
    case(
        "deepseek_v2",
        DEEPSEEK
        | {
            "topk_method": "group_limited_greedy",
            "rope_scaling": {
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
        *TAGS,
    ),
    case("deepseek_v3", DEEPSEEK, *TAGS, "array_mask"),
    case(
        "deepseek_v32",
        DEEPSEEK | INDEXER,
        *TAGS,
        "array_mask",
        "sparse_attention",
        notes="the indexer drops keys from 25 tokens on",
    ),
    case(
        "glm_moe_dsa",
        DEEPSEEK | INDEXER | {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}},
        *TAGS,
        "array_mask",
        "sparse_attention",
        notes="the indexer drops keys from 25 tokens on",
    ),
    case("glm4_moe_lite", DEEPSEEK, *TAGS, "array_mask"),
    case("mistral4", MISTRAL4, *TAGS),
    case(
        "mistral3",
        {"text_config": BASE | MISTRAL4 | {"model_type": "mistral4"}},
        *TAGS,
        "vl",
        base={},
    ),
    case("kimi_vl", {"text_config": BASE | DEEPSEEK}, *TAGS, "array_mask", "vl", base={}),
    case("kimi_k25", {"text_config": BASE | DEEPSEEK}, *TAGS, "array_mask", "vl", base={}),
    case("kimi_k2", DEEPSEEK, *TAGS, "array_mask", notes="an alias of deepseek_v3"),
    case(
        "longcat_flash",
        LONGCAT,
        "mla",
        "array_mask",
        notes="two attentions a layer; experts 8 and 9 are identities outside the SwitchGLU",
    ),
    case(
        "longcat_flash_ngram",
        LONGCAT | {"ngram_vocab_size_ratio": 2, "emb_neighbor_num": 3, "emb_split_num": 2},
        "mla",
        "array_mask",
        "recurrent",
        notes="the n-gram embedding keeps the last tokens in its cache",
    ),
    case(
        "deepseek_v41",
        {
            "num_hidden_layers": 4,
            "head_dim": 64,
            "q_lora_rank": 64,
            "qk_rope_head_dim": 16,
            "o_groups": 2,
            "o_lora_rank": 64,
            "n_routed_experts": EXPERTS,
            "routed_scaling_factor": 1.5,
            "sliding_window": 16,
            "compress_ratios": [0, 4, 4, 4],
            "kv_source_layer_ids": [1, 3],
            "index_source_layer_ids": [1, 3],
            "candidate_source_layer_id": 1,
            "candidate_topk_blocks": 2,
            "candidate_block_size": 4,
            "index_n_heads": 2,
            "index_head_dim": 32,
            "index_topk": 8,
            "hc_mult": 2,
            "hc_sinkhorn_iters": 3,
            "rms_norm_eps": 1e-6,
        },
        "mla",
        "sliding",
        "sparse_attention",
        "recurrent",
        "shared_expert",
        wraps_at=17,
        notes="attention uses a SwitchLinear (o_a_proj); its cache class cannot be saved",
    ),
]
