LINES: list[tuple[str, str]] = []
