// Requests to the server. Errors are thrown with the one line of the server.

async function post(path, document) {
  let response;
  try {
    response = await fetch(path, {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify(document),
    });
  } catch {
    throw new Error("the server does not answer; is flowbnn playground still running?");
  }
  if (!response.ok) {
    const answer = await response.json().catch(() => ({}));
    throw new Error(answer.error ?? answer.stopped ?? `the server answered ${response.status}`);
  }
  return response;
}

/** Returns the answer to a request. */
export async function ask(path, document = {}) {
  return (await post(`/api/${path}`, document)).json();
}

/** Returns the methods, presets and limits. */
export async function options() {
  return (await fetch("/api/options")).json();
}

/** Fits, and calls onProgress for every report. Returns {result} or {stopped}, or throws. */
export async function fit(document, onProgress) {
  const response = await post("/api/fit", document);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the fit ended without a result; press Fit again");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      const answer = JSON.parse(line);
      if (answer.progress) onProgress(answer.progress);
      else if (answer.error) throw new Error(answer.error);
      else return answer;
    }
  }
}

/** Returns a function that runs one request at a time, and of those that come meanwhile only the last. */
export function latest(run) {
  let busy = false;
  let next = null;
  return async function request(...values) {
    if (busy) {
      next = values;
      return;
    }
    busy = true;
    try {
      await run(...values);
    } finally {
      busy = false;
      if (next) {
        const again = next;
        next = null;
        request(...again);
      }
    }
  };
}
