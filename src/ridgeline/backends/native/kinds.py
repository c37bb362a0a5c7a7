"""The kinds of groups that the native backend runs as one: what can be said of it without importing it. No torch."""

NATIVE_KINDS = frozenset(
    {
        *("norm_qkv", "norm_q", "attention", "linear_add", "norm_gated", "norm_activated", "norm_head", "norm_linears"),
        *("embed", "rope_angles", "rope", "kv_write", "rmsnorm", "layernorm", "linear"),
        *("split_heads", "slice", "scale", "add", "add_row", "lora"),
        *("latent_write", "latent_attention"),
        *("activation", "gated_activation", "select_rows"),
        *("causal_conv", "selective_scan", "ssd", "delta_rule", "retention", "gated_norm"),
        *("route", "experts", "gate_rows"),
    }
)
