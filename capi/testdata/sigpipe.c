// After the first call SIGPIPE is what the host had before it loaded the library, or what it has set since.
// Usage: sigpipe LIBRARY ignored|default|later
#include <dlfcn.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

static void handler(int signal) { (void)signal; }

int main(int argc, char **argv) {
	if (argc != 3)
		return 2;
	int ignored = strcmp(argv[2], "ignored") == 0, later = strcmp(argv[2], "later") == 0;
	void (*want)(int) = ignored ? SIG_IGN : SIG_DFL;
	signal(SIGPIPE, want);
	void *lib = dlopen(argv[1], RTLD_NOW);
	if (!lib) {
		fprintf(stderr, "%s\n", dlerror());
		return 3;
	}
	int32_t (*get_num_threads)(void);
	*(void **)&get_num_threads = dlsym(lib, "gdn_get_num_threads");
	if (later) {
		// Only when the runtime has put its handler there can the host have put its own over it.
		struct sigaction now;
		do
			sigaction(SIGPIPE, 0, &now);
		while (now.sa_handler == want);
		signal(SIGPIPE, want = handler);
	}
	get_num_threads();
	struct sigaction now;
	sigaction(SIGPIPE, 0, &now);
	if (now.sa_handler != want) {
		fprintf(stderr, "SIGPIPE is not what the host set\n");
		return 1;
	}
	return 0;
}
