"""A page of `smyrf report`, taken apart for tests."""

import json
import re


def read(text):
    """The text of a page, and the data in it."""
    return text, json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.S)[1])
