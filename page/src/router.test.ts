// @vitest-environment happy-dom
import { beforeEach, expect, it } from "vitest";
import { checked, key, keyProblem, useKey } from "./api";
import { takeKey } from "./router";

const refused = (): Promise<Response> =>
  checked(
    new Response(JSON.stringify({ detail: "no" }), {
      status: 401,
      headers: { "Content-Type": "application/problem+json" },
    }),
  );

function follow(hash: string): void {
  location.hash = hash;
  takeKey();
}

beforeEach(() => useKey(""));

it("takes the first key of an address, and leaves the address without it", () => {
  follow("#/jobs/job-1?last=5&key=mine");
  expect(key.value).toBe("mine");
  expect(location.hash).toBe("#/jobs/job-1?last=5");
});

it("keeps the key that the tab holds, whatever a link brings", () => {
  useKey("mine");
  follow("#key=foreign");
  expect([key.value, sessionStorage.getItem("onbeat.key"), keyProblem.value]).toEqual(["mine", "mine", ""]);
  expect(location.hash).toBe("");
});

it("tries the link's key once the gateway refuses the held one, and asks once it refuses that, too", async () => {
  useKey("of the stack before");
  follow("#key=new");
  await expect(refused()).rejects.toThrow("no");
  expect([key.value, keyProblem.value]).toEqual(["new", ""]);
  await expect(refused()).rejects.toThrow("no");
  expect(keyProblem.value).toBe("The gateway refuses this key.");
  follow("#key=another");
  expect([key.value, keyProblem.value]).toEqual(["another", ""]);
});
