"""Facts of a text as an object of Python: the answer is held to a schema while it is generated.

pip install openai
python extract_json.py "Invoice 17, 3 cables at 4.50 each" [--url http://127.0.0.1:5465/v1]
"""

import argparse
from collections.abc import Sequence
from typing import Literal

from openai import OpenAI
from pydantic import BaseModel, ConfigDict, Field


class Item(BaseModel):
    """A line of an invoice."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=30)
    count: int = Field(ge=0, le=9999)
    cents: int = Field(ge=0, le=999_999, description="Price of one, in cents.")


class Invoice(BaseModel):
    """An invoice."""

    model_config = ConfigDict(extra="forbid")

    number: int = Field(ge=0, le=999_999)
    currency: Literal["EUR", "USD", "unknown"]
    items: list[Item] = Field(max_length=3)


def extract_invoice(client: OpenAI, model: str, text: str) -> Invoice:
    """Return the invoice that a text describes."""
    answer = client.chat.completions.parse(
        model=model,
        # The model does not see the schema: the prompt says what is wanted.
        messages=[
            {"role": "system", "content": "Return the invoice: number, currency, items."},
            {"role": "user", "content": text},
        ],
        response_format=Invoice,
        temperature=0,
    )
    found = answer.choices[0].message.parsed
    if found is None:
        raise ValueError("the answer was cut off by the token limit")
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the invoice as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("text")
    parser.add_argument("--url", default="http://127.0.0.1:5465/v1")
    parser.add_argument("--model", default="", help="default: the first that is served")
    options = parser.parse_args(arguments)
    with OpenAI(base_url=options.url, api_key="unused") as client:
        model = options.model or client.models.list().data[0].id
        print(extract_invoice(client, model, options.text).model_dump_json(indent=2))


if __name__ == "__main__":
    main()
