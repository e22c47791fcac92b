// One index serves both languages: pages in the reader's language come first, before any score.
"use strict";
{
  const chinese = document.documentElement.lang.startsWith("zh");
  const Plain = window.Worker;
  window.Worker = class extends Plain {
    postMessage(message, ...rest) {
      for (const page of message?.data?.docs ?? [])
        if (page.location.startsWith("zh/") === chinese) page.boost = 1e6;
      super.postMessage(message, ...rest);
    }
  };
}
