"""Regular expressions for those values of the JSON-schema keyword `format` that are enforced, such as "date".

The standard's other formats are refused. A format that the standard does not know, such as pydantic's `path`, is
ignored, as the standard allows.
"""

from __future__ import annotations

from functools import cache

from lp.sampling.regex_syntax import Node, whole

_DAYS = r"(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|1\d|2[0-8])"
_FOURTH = r"(?:0[48]|[2468][048]|[13579][26])"  # two digits that are a multiple of 4, but 00
DATE = rf"(?:\d{{4}}-(?:{_DAYS})|(?:\d\d{_FOURTH}|(?:00|{_FOURTH})00)-02-29)"
_OFFSET = r"(?:[zZ]|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
# A leap second is the last of a day in UTC, and is written there.
TIME = rf"(?:(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d+)?{_OFFSET}|23:59:60(?:\.\d+)?(?:[zZ]|[+-]00:00))"
_CLOCK = r"(?:\d+H(?:\d+M(?:\d+S)?)?|\d+M(?:\d+S)?|\d+S)"
DURATION = rf"P(?:(?:\d+Y(?:\d+M(?:\d+D)?)?|\d+M(?:\d+D)?|\d+D)(?:T{_CLOCK})?|T{_CLOCK}|\d+W)"
_BYTE = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_H16 = r"[0-9a-fA-F]{1,4}"
_LS32 = rf"(?:{_H16}:{_H16}|{IPV4})"
_IPV6_WAYS = [  # by RFC 3986: so many groups of 16 bits behind `::`, and at most so many before it
    rf"(?:{_H16}:){{6}}{_LS32}",
    rf"::(?:{_H16}:){{5}}{_LS32}",
    rf"(?:{_H16})?::(?:{_H16}:){{4}}{_LS32}",
    rf"(?:(?:{_H16}:)?{_H16})?::(?:{_H16}:){{3}}{_LS32}",
    rf"(?:(?:{_H16}:){{0,2}}{_H16})?::(?:{_H16}:){{2}}{_LS32}",
    rf"(?:(?:{_H16}:){{0,3}}{_H16})?::{_H16}:{_LS32}",
    rf"(?:(?:{_H16}:){{0,4}}{_H16})?::{_LS32}",
    rf"(?:(?:{_H16}:){{0,5}}{_H16})?::{_H16}",
    rf"(?:(?:{_H16}:){{0,6}}{_H16})?::",
]
IPV6 = f"(?:{'|'.join(_IPV6_WAYS)})"
UUID = r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
_LABEL = r"[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_ATOM = r"[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]+"
_QUOTED = r'"(?:[ !#-\[\]-~]|\\[ -~])*"'
EMAIL = rf"(?:{_ATOM}(?:\.{_ATOM})*|{_QUOTED})@(?:{_LABEL}(?:\.{_LABEL})*|\[(?:{IPV4}|IPv6:{IPV6})\])"
_ESCAPED = r"%[0-9a-fA-F]{2}"
_MARKS = r"a-zA-Z0-9._~!$&'()*+,;="
_SEGMENT = rf"(?:[{_MARKS}:@-]|{_ESCAPED})"
_HOST = rf"(?:\[(?:{IPV6}|v[0-9a-fA-F]+\.[{_MARKS}:-]+)\]|(?:[{_MARKS}-]|{_ESCAPED})*)"
_AUTHORITY = rf"(?:(?:[{_MARKS}:-]|{_ESCAPED})*@)?{_HOST}(?::\d*)?"
_PATH = rf"(?://{_AUTHORITY}(?:/{_SEGMENT}*)*|/(?:{_SEGMENT}+(?:/{_SEGMENT}*)*)?|{_SEGMENT}+(?:/{_SEGMENT}*)*)?"
URI = rf"[a-zA-Z][a-zA-Z0-9+.-]*:{_PATH}(?:\?(?:{_SEGMENT}|[/?])*)?(?:#(?:{_SEGMENT}|[/?])*)?"

ENFORCED = {
    "date": DATE,
    "time": TIME,
    "date-time": f"{DATE}[tT]{TIME}",
    "duration": DURATION,
    "email": EMAIL,
    "ipv4": IPV4,
    "ipv6": IPV6,
    "uuid": UUID,
    "uri": URI,
}
REFUSED = (
    "hostname",
    "idn-email",
    "idn-hostname",
    "iri",
    "iri-reference",
    "json-pointer",
    "regex",
    "relative-json-pointer",
    "uri-reference",
    "uri-template",
)


@cache
def format_language(name: str) -> Node:
    """Get the regular expression, as a syntax tree, that matches the strings of a `format`, such as "date".

    Args:
        name: a format that is enforced.
    """
    return whole(ENFORCED[name])
