"""quantrot recipes: list the shipped ones, show one, print the schema."""

from typing import Annotated

import typer

from quantrot.cli.common import Command, table

app = typer.Typer(help="Recipes: list them, show one, or print the JSON schema.", invoke_without_command=True)


@app.callback()
def main(context: typer.Context) -> None:
    """List the shipped recipes."""
    if context.invoked_subcommand is None:
        from quantrot.recipe import load_recipe, shipped_recipes

        rows = [[name, load_recipe(name).description] for name in shipped_recipes()]
        table("Shipped recipes", ["name", "what it does (engines)"], rows)


@app.command(cls=Command)
def show(name: Annotated[str, typer.Argument(help="A shipped recipe.")]) -> None:
    """Print a shipped recipe: a good start for your own."""
    from quantrot.recipe import SHIPPED, did_you_mean, shipped_recipes

    known = shipped_recipes()
    if name not in known:
        raise ValueError(
            f"no shipped recipe is called {name!r}{did_you_mean(name, known)}; there are {', '.join(known)}"
        )
    print((SHIPPED / f"{name}.yaml").read_text(encoding="utf-8"), end="")


@app.command(cls=Command)
def schema() -> None:
    """Print the JSON schema, for completion in editors (yaml-language-server: $schema=...)."""
    import json

    from quantrot.recipe import Recipe

    print(json.dumps(Recipe.model_json_schema(), indent=2))
