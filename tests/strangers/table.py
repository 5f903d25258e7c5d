"""All rows."""

from tests.strangers.framework_rows import FRAMEWORK_ROWS
from tests.strangers.idiom_rows import IDIOM_ROWS

ROWS = (
    *IDIOM_ROWS,
    *FRAMEWORK_ROWS,
)
