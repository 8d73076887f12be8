"""The supported model families; importing this package registers them."""

from routerl_jax.models.families import bert, clip, colqwen, llama, nv_embed, qwen_vl  # noqa: F401
