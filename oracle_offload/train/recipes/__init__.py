"""Recipes: thin wrappers over what torch and its libraries have, each checked against plain torch.

Each file is complete; ``docs/recipes.md`` shows them, the examples use them.
"""

# Here, where no torch is needed to name them; `optimizers` makes them.
OPTIMIZERS = ("adamw", "adamw8bit", "paged-adamw8bit", "paged-adamw", "adafactor")
