// Talks to the server: reads, asks a run for something, and hears of what has changed.

const csrf = document.querySelector('meta[name="weft-csrf"]').content;

export async function get(path, query = {}) {
  const text = new URLSearchParams(Object.entries(query).filter(([, value]) => value !== null && value !== undefined)).toString();
  const answer = await fetch(`/api/${path}${text ? `?${text}` : ""}`, { credentials: "same-origin" });
  if (answer.status === 401) location.assign("/login");
  if (!answer.ok) throw new Error((await answer.json().catch(() => ({}))).error || answer.statusText);
  return answer.json();
}

export async function ask(id, action) {
  const answer = await fetch("/api/ask", {
    method: "POST", credentials: "same-origin",
    headers: { "content-type": "application/json", "x-weft-csrf": csrf },
    body: JSON.stringify({ id, action }),
  });
  const said = await answer.json().catch(() => ({ error: "The page is older than its server. Reload it." }));
  if (!answer.ok) throw new Error(said.error || answer.statusText);
  return said;
}

export function listen(onRuns, onState) {
  const source = new EventSource("/api/stream");
  source.onopen = () => onState("live");
  source.onerror = () => onState("away");
  source.onmessage = (message) => onRuns(JSON.parse(message.data));
  return source;
}
