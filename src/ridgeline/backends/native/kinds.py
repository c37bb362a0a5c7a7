"""The kinds of groups that the native backend runs as one: what can be said of it without importing it. No torch."""

KINDS_BY_FILE = {
    "emit": (
        *("norm_qkv", "norm_q", "attention", "linear_add", "norm_gated", "norm_activated", "norm_head", "norm_linears"),
        *("embed", "rope_angles", "rope", "kv_write", "rmsnorm", "layernorm", "linear"),
        *("split_heads", "slice", "scale", "concat", "add", "add_row", "lora"),
        *("activation", "gated_activation", "select_rows", "softcap"),
    ),
    "emit_latent": ("latent_write", "latent_attention"),
    "emit_recurrent": ("causal_conv", "selective_scan", "ssd", "delta_rule", "retention", "gated_norm"),
    "emit_experts": ("route", "experts", "gate_rows"),
}
NATIVE_KINDS = frozenset(kind for kinds in KINDS_BY_FILE.values() for kind in kinds)
NATIVE_OPS = NATIVE_KINDS | {"lm_head"}  # it as part of a norm_head alone
