"""A chain of LangChain: a prompt with a blank, the model, and its text.

pip install langchain-openai
python langchain_chat.py "a spare PC" [--url http://127.0.0.1:5465/v1] [--model NAME]
"""

import argparse
from collections.abc import Sequence

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the chain's text as it comes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("thing")
    parser.add_argument("--url", default="http://127.0.0.1:5465/v1")
    parser.add_argument("--model", default="molink-demo")
    options = parser.parse_args(arguments)
    prompt = ChatPromptTemplate.from_template("What can I do with {thing}? One sentence.")
    model = ChatOpenAI(base_url=options.url, api_key="unused", model=options.model)
    for piece in (prompt | model | StrOutputParser()).stream({"thing": options.thing}):
        print(piece, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
