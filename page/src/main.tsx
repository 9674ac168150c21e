import { render } from "preact";
import "./design/tokens.css";
import "./design/base.css";
import "./design/parts.css";
import "./design/screens.css";
import { App } from "./app";
import { takeKey } from "./router";

takeKey();
render(<App />, document.getElementById("page")!);
