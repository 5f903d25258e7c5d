"""All rows."""

from tests.strangers.idiom_rows import IDIOM_ROWS

ROWS = (*IDIOM_ROWS,)
