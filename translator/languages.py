"""Language codes."""


def primary_language(code: str) -> str:
    """The language of a code without its region or script: "zh" for "zh-CN" and "zh_Hans"."""
    return code.replace("_", "-").split("-")[0].lower()
