// A service worker that keeps the pages for people: while the service is down they open, and say so in their own words.
const KEPT = "pages", PAGES = ["/", "/admin"];

self.addEventListener("install", event => event.waitUntil(caches.open(KEPT).then(kept => kept.addAll(PAGES)).then(() => self.skipWaiting())));
self.addEventListener("activate", event => event.waitUntil(clients.claim()));
self.addEventListener("fetch", event => {
  const {pathname} = new URL(event.request.url);
  if (event.request.mode == "navigate" && PAGES.includes(pathname)) event.respondWith(open(event.request, pathname));
});

async function open(request, path) {
  const kept = await caches.open(KEPT);
  let answer = null;
  try { answer = await fetch(request); } catch { /* Nobody listens. */ }
  if (answer?.ok) await kept.put(path, answer.clone());
  return answer?.ok ? answer : await kept.match(path) || answer || Response.error();
}
