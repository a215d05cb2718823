"""Recipes: thin wrappers over what torch and its libraries have, each checked against plain torch.

Each file stands alone; ``docs/recipes.md`` shows them, `oracle_offload.trainer` uses them.
"""
