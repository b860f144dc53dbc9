// Lets readers choose another version of the same page, where the site has several: tools/site_versions.py lists them.
(async () => {
  const version = new URL(document.documentElement.dataset.content_root, location.href); // the folder of this version
  const site = new URL("../", version);
  const answer = location.protocol.startsWith("http") && (await fetch(new URL("versions.json", site)).catch(() => null));
  if (!answer?.ok) return;
  const choice = document.createElement("select");
  choice.ariaLabel = "Version";
  choice.style.margin = "0 var(--sidebar-item-spacing-horizontal) 0.5rem";
  for (const name of await answer.json()) {
    const here = new URL(`${name}/`, site).href === version.href;
    choice.add(new Option(name, name, here, here));
  }
  choice.onchange = async () => {
    const page = new URL(location.href.slice(version.href.length), new URL(`${choice.value}/`, site));
    const exists = (await fetch(page, { method: "HEAD" })).ok;
    location.href = exists ? page : new URL(`${choice.value}/`, site);
  };
  document.querySelector(".sidebar-brand")?.after(choice);
})();
