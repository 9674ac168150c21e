"""A small MCP server of the package's own class."""

from __future__ import annotations

from mcp.server import MCPServer
from mcp_types import ImageContent, TextContent

server = MCPServer("store")
prices = {"apple": 3, "pear": 4}


@server.tool()
def price(thing: str) -> int:
    """Says what one piece costs."""
    return prices[thing]


@server.tool()
def raise_price(thing: str, by: int = 1) -> str:
    """Makes a thing dearer."""
    prices[thing] += by
    return "done"


@server.tool()
def show(thing: str) -> list[TextContent | ImageContent]:
    """Shows a thing."""
    return [TextContent(text=f"an {thing}"), ImageContent(data="aGk=", mime_type="image/png")]


@server.tool()
def long(characters: int) -> str:
    """Says much."""
    return "x" * characters


if __name__ == "__main__":
    server.run()
