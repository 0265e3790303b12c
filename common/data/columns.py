"""Columns that a flag names."""

from common.data.rows import JSON_LINE, RowFiles


def first_part(column: str) -> str:
    """The column of a file that holds `column`: EXTRA of EXTRA.NAME; else itself."""
    return column.partition(".")[0]


def column_value(record: dict, column: str) -> object:
    """A row's value of a column; EXTRA.NAME may be a key of an object. None if there is none."""
    if column in record:
        return record[column]
    value: object = record
    for name in column.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def check_column(files: RowFiles, column: str) -> None:
    """ValueError if a file lacks the column and, for EXTRA.NAME, the column EXTRA too. A line of
    JSON is checked when its row is read."""
    for path, table in zip(files.paths, files.tables):
        names = table.column_names
        if JSON_LINE not in names and not {column, first_part(column)} & set(names):
            raise ValueError(
                f"{files.flag}: {path} lacks {column}; it has the columns {', '.join(names)}"
            )


def text_problems(files: RowFiles, column: str) -> dict[int, str]:
    """Row index -> what is wrong, of the rows that have no usable text in the column."""
    problems: dict[int, str] = {}
    for index, record in enumerate(files.records((column, first_part(column)))):
        if isinstance(record, str):
            problems[index] = record  # why the row cannot be read
            continue
        value = column_value(record, column)
        if not isinstance(value, str) or not value.strip():
            problems[index] = f"{column} is {value!r:.80}, expected a text"
            continue
        try:
            value.encode()
        except UnicodeEncodeError as error:  # half of a surrogate pair
            problems[index] = f"{column} cannot be encoded: {error}"
    return problems
