"""python -m quantrot"""

from quantrot.cli.main import app

app()
